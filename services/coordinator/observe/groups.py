"""Groups as samples for people, one view per trajectory; and pages of them, the newest first, with filters."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

import structlog

from millrace.contracts.trajectories import episode_sizes, sampled_spans
from millrace.contracts.v1 import common_pb2, trainer_pb2
from millrace.ids import PromptId
from millrace.rest import GroupPage, GroupView, SampleView, TurnView
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


READ = 400
"""Samples that are read from the store at a time."""
MOST_READ = 8000
"""Samples that are looked at for one page; those that come after have another page."""


@dataclass(frozen=True)
class Wanted:
    """Which groups a page has; None and empty texts: any."""

    step: int | None = None
    purpose: str = ""
    member: str = ""
    data_source: str = ""
    text: str = ""
    """Part of a prompt or of an answer, small or capital letters."""
    least: float | None = None
    greatest: float | None = None
    """Bounds of the reward of at least one sample."""

    def fits(self, group: GroupView) -> bool:
        first = group.samples[0]
        return (
            (self.step is None or group.step == self.step)
            and (not self.purpose or group.purpose == self.purpose)
            and (not self.member or first.member == self.member)
            and (not self.data_source or group.data_source == self.data_source)
            and ((self.least is None and self.greatest is None) or any(self._rewarded(s) for s in group.samples))
            and (not self.text or any(self._says(sample) for sample in group.samples))
        )

    def _rewarded(self, sample: SampleView) -> bool:
        reward = sample.reward
        return (
            reward is not None
            and (self.least is None or reward >= self.least)
            and (self.greatest is None or reward <= self.greatest)
        )

    def _says(self, sample: SampleView) -> bool:
        text = self.text.lower()
        return text in sample.answer.lower() or text in sample.prompt.lower()


async def page(records: Records, wanted: Wanted, limit: int, cursor: int | None) -> GroupPage:
    """Up to `limit` groups. `cursor`: `next` of the page before."""
    total = await records.sample_count()
    end = total if cursor is None else min(cursor, total)
    if wanted.step is not None and cursor is None:
        end = await _end_of(records, wanted.step, total)
    found: list[GroupView] = []
    held: list[SampleView] = []  # those from `first` up to `end`
    first, oldest = end, max(0, end - MOST_READ)
    while end > oldest and len(found) < limit:
        held = [*await records.sample_range(max(0, first - READ), first), *held]
        first = max(0, first - READ)
        groups = list(_groups(held))
        for group in reversed(groups if first == 0 else groups[1:]):  # the first one may begin further back
            if wanted.step is not None and group.step < wanted.step:
                return GroupPage(groups=found, next=None, total=total)
            end -= len(group.samples)
            if wanted.fits(group):
                found.append(group)
            if len(found) == limit:
                break
        held = held[: end - first]
    return GroupPage(groups=found, next=end or None, total=total)


def _groups(samples: list[SampleView]) -> Iterator[GroupView]:
    for (step, prompt, purpose), own in groupby(samples, key=lambda s: (s.step, s.prompt_id, s.purpose)):
        of_group = list(own)
        yield GroupView(
            step=step, prompt_id=prompt, purpose=purpose, data_source=of_group[0].data_source, samples=of_group
        )


async def _end_of(records: Records, step: int, total: int) -> int:
    """Index after the last sample of `step`, or after those before it if there is none. Steps grow along the list,
    except where a job went back to an earlier one: then the end of one of its runs is found."""
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        found = await records.sample_range(middle, middle + 1)
        if found and found[0].step <= step:
            low = middle + 1
        else:
            high = middle
    return low
