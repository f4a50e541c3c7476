"""The messages that a replica has to receive by either path, and what it makes of those that it did receive."""

import pytest

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidState, PublicationFailed
from millrace.ids import Version
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.plans.manifest import Manifest, TensorInfo
from services.rollout.weights.transfer_request import ExpectedMessages, TransferRequest, expected
from tests.layouts import whole_layout

MANIFEST = Manifest((TensorInfo("a", (8, 8), "float32"), TensorInfo("b", (8,), "float32")))
BROADCAST, SHARDED = weights_pb2.PATH_GATHER_BROADCAST, weights_pb2.PATH_SHARDED


def request(path: int, workers: int) -> TransferRequest:
    boxes = whole_layout(MANIFEST).boxes
    sides = weights_pb2.Sides(
        senders=wire_layouts.encode([boxes]), receivers=wire_layouts.encode([boxes] * workers), message_bytes=64
    )
    return TransferRequest(
        "job/1/1/1",
        Version(1),
        MANIFEST,
        "127.0.0.1",
        1,
        1 + workers,
        1,
        5.0,
        path,
        layouts=sides,  # type: ignore[arg-type]
    )


def messages(path: int, workers: int = 2) -> ExpectedMessages:
    return expected(request(path, workers), workers, wire_layouts.Planner())


def sent(expected_messages: ExpectedMessages) -> list[int]:
    """A checksum for each message."""
    return [100 + number for number in range(expected_messages.sent)]


@pytest.mark.parametrize("path", [BROADCAST, SHARDED])
def test_every_worker_has_to_get_what_was_sent(path: int) -> None:
    found = messages(path)
    whole = tuple((number, 100 + number) for number in found.numbers)
    assert len(set(found.numbers)) == found.sent and len(whole) == 2 * found.sent
    found.compare(whole[::-1], sent(found), "rollout-1")
    with pytest.raises(PublicationFailed, match=r"rollout-1 got \d+ messages of \d+"):
        found.compare(whole[1:], sent(found), "rollout-1")
    with pytest.raises(PublicationFailed, match="messages of"):
        found.compare(whole, sent(found)[1:], "rollout-1")
    changed = (*whole[:-1], (whole[-1][0], 0))  # of one worker only
    with pytest.raises(PublicationFailed, match=r"1 messages arrived at rollout-1 changed, with parts of [ab]"):
        found.compare(changed, sent(found), "rollout-1")


def test_both_paths_tell_the_bytes_and_the_plan() -> None:
    broadcast, shards = messages(BROADCAST, workers=1), messages(SHARDED, workers=1)
    assert broadcast.plan_hash == gather_broadcast(MANIFEST, 2).hash
    assert shards.plan_hash == wire_layouts.Planner().plan(MANIFEST, request(SHARDED, 1).layouts).hash
    assert broadcast.bytes == shards.bytes == MANIFEST.bytes
    assert {name for number in shards.numbers for name in shards.tensors_of(number)} == {"a", "b"}


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(InvalidState, match="no path 7"):
        messages(7)


def test_a_request_that_only_names_its_plan_needs_one_that_knows_it() -> None:
    whole = TransferRequest.decode(request(SHARDED, 1).encode())
    assert whole is not None and whole == request(SHARDED, 1)
    named = TransferRequest(**{**vars(whole), "plan_hash": b"x" * 32})
    assert TransferRequest.decode(named.encode(whole=False)) is None
    assert TransferRequest.decode(named.encode(whole=False), named.known_plan) == named
