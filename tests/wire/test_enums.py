"""The enums of the contracts and those of Python have the same members."""

import pytest

from millrace.contracts.v1 import common_pb2
from millrace.drops import Drop, DropReason
from millrace.errors import InvalidState
from millrace.ids import Purpose
from millrace.wire import enums


def test_every_drop_reason_crosses_the_wire() -> None:
    names = {f"DROP_REASON_{reason.name}": reason for reason in DropReason}
    assert {common_pb2.DropReason.Name(number): reason for number, reason in enums.DROP_REASONS.items()} == names
    assert set(names) == set(common_pb2.DropReason.keys())
    for reason in DropReason:
        assert reason.value == reason.name.lower()
        drop = Drop(reason, "what happened")
        assert enums.drop_of(common_pb2.Drop.FromString(enums.drop_message(drop).SerializeToString())) == drop


def test_a_reason_of_a_later_release_is_unspecified() -> None:
    later = common_pb2.Drop(detail="what happened")
    later.reason = 999  # type: ignore[assignment]
    assert enums.drop_of(later) == Drop(DropReason.UNSPECIFIED, "what happened")


def test_every_purpose_crosses_the_wire() -> None:
    names = {f"PURPOSE_{purpose.name}" for purpose in Purpose}
    assert names | {"PURPOSE_UNSPECIFIED"} == set(common_pb2.Purpose.keys())
    for purpose in Purpose:
        assert enums.purpose_of(enums.PURPOSE_NUMBERS[purpose]) is purpose
    with pytest.raises(InvalidState, match="purpose: 0"):
        enums.purpose_of(common_pb2.PURPOSE_UNSPECIFIED)
