"""Groups as samples for people: one view per trajectory."""

import json
from collections.abc import Sequence
from typing import Any

from millrace.ids import PromptId
from millrace.rest import SampleView
from millrace.wire.enums import PURPOSES
from millrace.wire.v1 import common_pb2
from services.coordinator.store.prompts import Prompts

STOPS = {
    common_pb2.STOP_REASON_END_OF_TURN: "end_of_turn",
    common_pb2.STOP_REASON_STOP_STRING: "stop_string",
    common_pb2.STOP_REASON_LENGTH: "length",
}


async def samples_in(prompts: Prompts, wanted: Sequence[PromptId], step: int) -> list[SampleView]:
    """Samples of `step`, from those of the `wanted` groups that the store still holds."""
    groups = [common_pb2.Group.FromString(g) for p in wanted if (g := await prompts.group(p)) is not None]
    return [sample for group in groups for sample in samples_of(group, step)]


def samples_of(group: common_pb2.Group, step: int) -> list[SampleView]:
    """One sample for each trajectory of a group that belongs to `step`."""
    return [_sample(group, trajectory, step) for trajectory in group.trajectories]


def _sample(group: common_pb2.Group, trajectory: common_pb2.Trajectory, step: int) -> SampleView:
    return SampleView(
        step=step,
        prompt_id=group.prompt_id,
        purpose=PURPOSES.get(group.purpose, ""),
        prompt=group.prompt_text,
        answer=trajectory.text,
        ground_truth=_json(group.ground_truth),
        reward=trajectory.reward if trajectory.HasField("reward") else None,
        reward_failure=trajectory.reward_failure or None,
        stop_reason=STOPS.get(trajectory.stop_reason, ""),
        tokens=len(trajectory.tokens) // 4,
        versions=sorted({span.version for span in trajectory.versions}),
        member=group.member_id,
    )


def _json(data: str) -> Any:
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        return data
