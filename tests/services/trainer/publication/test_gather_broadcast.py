"""The sender's side of a publication: bit for bit, per reference, and what a dead receiver does to it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.errors import Fenced, InvalidState, PublicationFailed
from millrace.ids import Version
from millrace.weights.plans.manifest import Manifest, TensorInfo
from services.trainer.backends import build
from services.trainer.protocol.backend import Backend
from services.trainer.publication import gather_broadcast
from services.trainer.publication.sender import Sender
from tests.forked import CONTEXT
from tests.services.trainer.backends.fsdp2.test_backend import saved_tensors
from tests.services.trainer.groups import job_spec
from tests.services.trainer.publication.receiver import Receiver, receive_and_die, reference


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOST", "127.0.0.1")


def prepare_request(
    ref: weights_pb2.PublicationRef, dtype: str = "float32", receivers: int = 1, deadline_s: float = 20.0
) -> pb.PrepareSendRequest:
    return pb.PrepareSendRequest(
        publication=ref,
        path=weights_pb2.PATH_GATHER_BROADCAST,
        receivers=[weights_pb2.Receiver(member_id=f"r{i}", first_rank=1 + i, world_size=1) for i in range(receivers)],
        dtype=dtype,
        deadline_s=deadline_s,
    )


def transfer_request(ref: weights_pb2.PublicationRef) -> pb.TransferSendRequest:
    return pb.TransferSendRequest(publication=ref)


def published(
    sender: Sender, backend: Backend, version: int, dtype: str = "float32", receivers: int = 1
) -> list[Receiver]:
    """One publication, received; the sender's checksums are compared."""
    ref = reference(version)
    prepared = sender.prepare_send(prepare_request(ref, dtype, receivers), backend, Version(version))
    ends = [Receiver(ref, prepared, rank=1 + i) for i in range(receivers)]
    sent = sender.transfer(transfer_request(ref), backend, Version(version))
    for end in ends:
        end.wait()
        assert list(sent.checksums.values) == end.checksums()
        end.close()
    assert sent.report.bytes == ends[0].manifest.bytes and sent.report.wire_s > 0
    sender.close()
    return ends


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
def test_received_bit_for_bit(one_rank: torch.device, model: str, dtype: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model)
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in saved_tensors(folder).items()}
    backend = build(job_spec(folder), one_rank)
    for end in published(Sender(0, "trainer-1"), backend, 0, dtype, receivers=2):
        assert end.received.keys() == expected.keys()
        assert ("lm_head.weight" in expected) == (model == "untied_model")
        for name, tensor in end.received.items():
            assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


def test_nobody_to_send_to(one_rank: torch.device, tied_model: Path) -> None:
    backend = build(job_spec(tied_model), one_rank)
    sender, ref = Sender(0, "trainer-1"), reference(0)
    prepared = sender.prepare_send(prepare_request(ref, receivers=0), backend, Version(0))
    sent = sender.transfer(transfer_request(ref), backend, Version(0))
    assert len(sent.checksums.values) == len(prepared.manifest.tensors)


def test_only_the_version_held_is_published(one_rank: torch.device, tied_model: Path) -> None:
    backend, sender = build(job_spec(tied_model), one_rank), Sender(0, "trainer-1")
    with pytest.raises(Fenced, match="version that is not held: 3 is"):
        sender.prepare_send(prepare_request(reference(2)), backend, Version(3))
    with pytest.raises(InvalidState, match="not prepared"):
        sender.transfer(transfer_request(reference(3)), backend, Version(3))
    sender.prepare_send(prepare_request(reference(3)), backend, Version(3))
    with pytest.raises(Fenced, match="late"):
        sender.transfer(transfer_request(reference(3)), backend, Version(4))
    sender.close()


def test_a_receiver_that_does_not_come(one_rank: torch.device, tied_model: Path) -> None:
    backend, sender, ref = build(job_spec(tied_model), one_rank), Sender(0, "trainer-1"), reference(0)
    sender.prepare_send(prepare_request(ref, deadline_s=1.0), backend, Version(0))
    began = time.monotonic()
    with pytest.raises(PublicationFailed, match=r"could not join|its deadline has passed"):
        sender.transfer(transfer_request(ref), backend, Version(0))
    assert time.monotonic() - began < 60.0
    published(sender, backend, 0)


def test_a_receiver_that_dies_on_the_way(one_rank: torch.device, tied_model: Path) -> None:
    backend, sender, ref = build(job_spec(tied_model), one_rank), Sender(0, "trainer-1"), reference(0)
    prepared = sender.prepare_send(prepare_request(ref, deadline_s=120.0), backend, Version(0))
    dying = CONTEXT.Process(target=receive_and_die, args=(ref.SerializeToString(), prepared.SerializeToString()))
    dying.start()  # a process of its own, whose sockets close when it dies
    began = time.monotonic()
    with pytest.raises(PublicationFailed, match="could not be sent"):
        sender.transfer(transfer_request(ref), backend, Version(0))
    assert time.monotonic() - began < 60.0
    dying.join(60)
    published(sender, backend, 0)


class Large:
    """Exports more than sockets buffer, so that a receiver who takes nothing holds the sender up."""

    info = TensorInfo("large", (32 << 20,), "float32")

    def manifest(self, dtype: str) -> Manifest:
        return Manifest((self.info,))

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
        yield self.info, torch.zeros(self.info.shape)


@pytest.mark.parametrize("who", ["deadline", "operation"])
def test_a_receiver_that_hangs(
    who: str, one_rank: torch.device, tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_broadcast, "OPERATION_S", 2.0 if who == "operation" else 120.0)
    sender, ref, large = Sender(0, "trainer-1"), reference(0), cast(Backend, Large())
    prepared = sender.prepare_send(
        prepare_request(ref, deadline_s=2.0 if who == "deadline" else 120.0), large, Version(0)
    )
    hanging = Receiver(ref, prepared, tensors=0)
    began = time.monotonic()
    with pytest.raises(PublicationFailed, match=r"large could not be sent|its deadline has passed"):
        sender.transfer(transfer_request(ref), large, Version(0))
    assert 1.5 < time.monotonic() - began < 60.0
    hanging.close()
    published(sender, build(job_spec(tied_model), one_rank), 0)


def test_an_aborted_transfer_stops_before_its_next_tensor(one_rank: torch.device, tied_model: Path) -> None:
    backend, sender, ref = build(job_spec(tied_model), one_rank), Sender(0, "trainer-1"), reference(0)
    prepared = sender.prepare_send(prepare_request(ref), backend, Version(0))
    receiver = Receiver(ref, prepared, tensors=2)
    gathered = backend.export

    def aborting(dtype: str) -> Iterator[Any]:
        for number, item in enumerate(gathered(dtype)):
            if number == 2:
                sender.abort("a newer publication takes its place")
            yield item

    backend.export = aborting  # type: ignore[method-assign]
    with pytest.raises(PublicationFailed, match="a newer publication takes its place"):
        sender.transfer(transfer_request(ref), backend, Version(0))
    assert len(receiver.wait()) == 2
    receiver.close()
    backend.export = gathered  # type: ignore[method-assign]
    published(sender, backend, 0)
