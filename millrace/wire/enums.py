"""Enums of the contracts as Python enums, and back; and the fields of a message."""

from collections.abc import Iterable, MutableSequence
from typing import Any

from google.protobuf.message import Message

from millrace.contracts.v1 import common_pb2, rollout_pb2
from millrace.drops import Drop, DropReason
from millrace.errors import InvalidState
from millrace.ids import Purpose
from millrace.sandbox.boundaries import Boundary, Missing

PURPOSES = {
    common_pb2.PURPOSE_TRAIN: Purpose.TRAIN,
    common_pb2.PURPOSE_EVALUATION: Purpose.EVALUATION,
}
PURPOSE_NUMBERS = {purpose: number for number, purpose in PURPOSES.items()}

DROP_REASONS = {
    common_pb2.DROP_REASON_UNSPECIFIED: DropReason.UNSPECIFIED,
    common_pb2.DROP_REASON_BAD_ROW: DropReason.BAD_ROW,
    common_pb2.DROP_REASON_BAD_PROMPT: DropReason.BAD_PROMPT,
    common_pb2.DROP_REASON_PROMPT_TOO_LONG: DropReason.PROMPT_TOO_LONG,
    common_pb2.DROP_REASON_BAD_LOGPROBS: DropReason.BAD_LOGPROBS,
    common_pb2.DROP_REASON_REWARD_FAILED: DropReason.REWARD_FAILED,
    common_pb2.DROP_REASON_INCOMPLETE_GROUP: DropReason.INCOMPLETE_GROUP,
    common_pb2.DROP_REASON_MALFORMED_GROUP: DropReason.MALFORMED_GROUP,
    common_pb2.DROP_REASON_REPLICA_FAILED: DropReason.REPLICA_FAILED,
    common_pb2.DROP_REASON_NO_SIGNAL: DropReason.NO_SIGNAL,
    common_pb2.DROP_REASON_JOB_SUCCEEDED: DropReason.JOB_SUCCEEDED,
    common_pb2.DROP_REASON_JOB_FAILED: DropReason.JOB_FAILED,
    common_pb2.DROP_REASON_JOB_CANCELLED: DropReason.JOB_CANCELLED,
    common_pb2.DROP_REASON_JOB_PREEMPTED: DropReason.JOB_PREEMPTED,
    common_pb2.DROP_REASON_GROUP_TOO_LARGE: DropReason.GROUP_TOO_LARGE,
    common_pb2.DROP_REASON_ENVIRONMENT_FAILED: DropReason.ENVIRONMENT_FAILED,
    common_pb2.DROP_REASON_KILLED_REPLICAS: DropReason.KILLED_REPLICAS,
    common_pb2.DROP_REASON_TOO_STALE: DropReason.TOO_STALE,
}
BOUNDARIES = {
    rollout_pb2.BOUNDARY_PROCESSES: Boundary.PROCESSES,
    rollout_pb2.BOUNDARY_FILES: Boundary.FILES,
    rollout_pb2.BOUNDARY_NETWORK: Boundary.NETWORK,
    rollout_pb2.BOUNDARY_IPC: Boundary.IPC,
    rollout_pb2.BOUNDARY_USER: Boundary.USER,
    rollout_pb2.BOUNDARY_LIMITS: Boundary.LIMITS,
}
BOUNDARY_NUMBERS = {boundary: number for number, boundary in BOUNDARIES.items()}
DROP_REASON_NUMBERS = {reason: number for number, reason in DROP_REASONS.items()}


def purpose_of(number: common_pb2.Purpose) -> Purpose:
    """Raises InvalidState if a message of another release names none that is known."""
    if number not in PURPOSES:
        what = f"purpose: {number}: neither training nor evaluation."
        raise InvalidState(what, "run the same release of millrace everywhere.")
    return PURPOSES[number]


def missing_of(messages: Iterable[rollout_pb2.MissingBoundary]) -> dict[Boundary, str]:
    """The boundaries that a machine does not give, and why; without those of a later release, which are not known."""
    return {BOUNDARIES[each.boundary]: each.reason for each in messages if each.boundary in BOUNDARIES}


def missing_messages(missing: Iterable[Missing]) -> list[rollout_pb2.MissingBoundary]:
    return [
        rollout_pb2.MissingBoundary(boundary=BOUNDARY_NUMBERS[each.boundary], reason=each.reason) for each in missing
    ]


def drop_of(message: common_pb2.Drop) -> Drop:
    return Drop(DROP_REASONS.get(message.reason, DropReason.UNSPECIFIED), message.detail)


def drop_message(drop: Drop) -> common_pb2.Drop:
    return common_pb2.Drop(reason=DROP_REASON_NUMBERS[drop.reason], detail=drop.detail)


def fields_of(message: Message) -> dict[str, Any]:
    """The fields of a message by name: those that are repeated as lists, None for an optional one that is absent."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        absent = field.has_presence and not message.HasField(field.name)
        value = None if absent else getattr(message, field.name)
        found[field.name] = list(value) if isinstance(value, MutableSequence) else value
    return found
