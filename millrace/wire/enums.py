"""Enums of the contracts as Python enums, and back; and the fields of a message."""

from collections.abc import Iterable, MutableSequence
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from millrace.contracts.v1 import common_pb2, rollout_pb2
from millrace.drops import Drop, DropReason
from millrace.errors import InvalidState
from millrace.ids import Purpose
from millrace.sandbox.boundaries import Boundary, Missing

Kind = TypeVar("Kind", bound=Enum)


def _numbers(kind: type[Kind], enum: EnumTypeWrapper, prefix: str) -> dict[Kind, Any]:
    """The number of each member in an enum of the contracts, whose names are the same behind `prefix`."""
    return {member: enum.Value(f"{prefix}_{member.name}") for member in kind}


PURPOSE_NUMBERS = _numbers(Purpose, common_pb2.Purpose, "PURPOSE")
PURPOSES = {number: purpose for purpose, number in PURPOSE_NUMBERS.items()}
DROP_REASON_NUMBERS = _numbers(DropReason, common_pb2.DropReason, "DROP_REASON")
DROP_REASONS = {number: reason for reason, number in DROP_REASON_NUMBERS.items()}
BOUNDARY_NUMBERS = _numbers(Boundary, rollout_pb2.Boundary, "BOUNDARY")
BOUNDARIES = {number: boundary for boundary, number in BOUNDARY_NUMBERS.items()}


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
