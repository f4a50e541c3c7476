"""Groups as samples for people: one view per trajectory."""

import itertools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import structlog

from millrace.contracts.trajectories import episode_sizes, sampled_spans
from millrace.contracts.v1 import common_pb2, trainer_pb2
from millrace.ids import PromptId
from millrace.rest import SampleView, TurnView
from millrace.wire.arrays import unpack_floats
from millrace.wire.enums import PURPOSES
from services.coordinator.observe import images, tokens
from services.coordinator.store.prompts import Prompts
from services.coordinator.store.records import Records

log = structlog.get_logger(__name__)
STOPS = {
    common_pb2.STOP_REASON_END_OF_TURN: "end_of_turn",
    common_pb2.STOP_REASON_STOP_STRING: "stop_string",
    common_pb2.STOP_REASON_LENGTH: "length",
}


async def samples_in(
    prompts: Prompts,
    records: Records,
    wanted: Sequence[PromptId],
    step: int,
    trained: Mapping[str, trainer_pb2.TrainedGroup] = MappingProxyType({}),
) -> list[SampleView]:
    """Samples of `step`, from those of the `wanted` groups that the store still holds. Their tokens are kept too, with
    what the trainer reported of them: `trained`, by prompt. What does not fit its group is left out."""
    found: list[SampleView] = []
    for prompt in wanted:
        if (data := await prompts.group(prompt)) is not None:
            group, of_group = common_pb2.Group.FromString(data), trained.get(prompt)
            if of_group is not None and not tokens.fits(of_group, group):
                log.warning("the trainer reported something else than the tokens of a group", prompt=prompt)
                of_group = None
            found += samples_of(group, step, await records.add_tokens(tokens.record(group, of_group)), of_group)
    return found


def samples_of(
    group: common_pb2.Group, step: int, record: str = "", trained: trainer_pb2.TrainedGroup | None = None
) -> list[SampleView]:
    """One sample for each trajectory of a group that belongs to `step`. The group may be one that `fault` refuses.
    `record` names what is kept of its tokens. `trained`: what the trainer reported of them."""
    counted = (itertools.repeat(number, size) for number, size in enumerate(episode_sizes(group)))
    numbers = itertools.chain(itertools.chain.from_iterable(counted), itertools.repeat(0))
    advantages = [None] * len(group.trajectories) if trained is None else map(_advantage, trained.trajectories)
    shown = zip(group.trajectories, numbers, advantages, strict=False)
    told = {"record": record, "images": images.views(group.images), "image_mark": group.image_mark}
    return [
        _sample(group, one, step, number).model_copy(update={**told, "advantage": advantage})
        for one, number, advantage in shown
    ]


def _advantage(trained: trainer_pb2.TrainedTrajectory) -> float | None:
    """The mean over the trajectory's sampled tokens."""
    return float(unpack_floats(trained.advantages).mean(dtype="float64")) if trained.advantages else None


def _sample(group: common_pb2.Group, trajectory: common_pb2.Trajectory, step: int, episode: int) -> SampleView:
    turns, details = _turns(trajectory), _json(trajectory.reward_details)
    return SampleView(
        step=step,
        prompt_id=group.prompt_id,
        purpose=PURPOSES.get(group.purpose, ""),
        prompt=trajectory.prompt_text or group.prompt_text,
        question=group.question,
        answer="".join(turn.given + turn.answer for turn in turns) if turns else trajectory.text,
        ground_truth=_json(group.ground_truth),
        reward=trajectory.reward if trajectory.HasField("reward") else None,
        reward_failure=trajectory.reward_failure or None,
        stop_reason=STOPS.get(trajectory.stop_reason, ""),
        tokens=len(trajectory.tokens) // 4,
        versions=sorted({span.version for span in trajectory.versions}),
        member=group.member_id,
        sampled_tokens=sum(end - start for start, end in sampled_spans(trajectory)),
        episode=episode,
        turns=turns,
        data_source=group.data_source,
        details=details if isinstance(details, dict) else {},
        metadata=metadata if isinstance(metadata := _json(trajectory.metadata), dict) else {},
    )


def _turns(trajectory: common_pb2.Trajectory) -> list[TurnView]:
    ends = [0, *(turn.end for turn in trajectory.turns)]
    return [
        TurnView(
            given=turn.given_text,
            given_tokens=turn.start - end,
            answer=turn.text,
            sampled_tokens=turn.end - turn.start,
            reward=turn.reward,
            stop_reason=STOPS.get(turn.stop_reason, ""),
            versions=sorted({s.version for s in trajectory.versions if s.start < turn.end and s.end > turn.start}),
        )
        for end, turn in zip(ends, trajectory.turns, strict=False)
    ]


def _json(data: str) -> Any:
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        return data
