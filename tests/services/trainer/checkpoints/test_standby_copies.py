"""The trainer's state from memory to memory: bit for bit, whole or not at all, and no step waits for it."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.errors import Fenced, InvalidState, MillraceError, PublicationFailed
from millrace.ids import Version
from services.trainer.checkpoints.box_files import keyed_parts
from services.trainer.checkpoints.standby_copies import JOIN_S, STALL_S, StandbyCopies
from services.trainer.protocol.backend import Backend, models
from services.trainer.ranks.commands import ControlThread
from tests.services.trainer.calls import JOB
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.process import TwoRanks, trainer
from tests.services.trainer.step.test_step import OPTIMIZER, local_step

pytestmark = pytest.mark.slow

KL = {"kl": {"name": "k2"}, "kl_coefficient": 0.2, "kl_target": 1e-3, "kl_horizon": 40}
STANDBY = "standby"
COPY_S = 1.5
"""About how long a copy takes in `slow_copies`."""


class Pair:
    """A trainer in the seat and one that stands by, of two ranks each."""

    def __init__(
        self, served: ScriptedCoordinator, folder: Path, running: ExitStack, module: str = "services.trainer"
    ) -> None:
        self.folder = folder

        def start(name: str) -> TwoRanks:
            started = trainer(served, folder / f"{name}.log", ranks=2, module=module)
            return TwoRanks(running.enter_context(started), served)

        self.seat, self.standby = start("seat"), start("standby")

    def configure(self, spec: Any) -> None:
        self.seat.calls.configure(spec)
        self.standby.calls.configure(spec, configuration=STANDBY)

    def step(self, number: int, of: TwoRanks | None = None) -> dict[str, float]:
        return (of or self.seat).step(number, random_groups(4, 4, seed=number), JOB)

    def send(self, version: int) -> weights_pb2.Rendezvous:
        """Begins a copy, once the one before has ended."""
        request = pb.CopyStateRequest(job_id=JOB, version=version, receivers=["trainer-2"])
        until = time.monotonic() + 2 * (STALL_S + JOIN_S)
        while not (meet := self.seat.calls.call(TrainerRpc.CopyState, request).rendezvous):
            assert time.monotonic() < until
            time.sleep(0.05)
        return meet[0]

    def receive(self, version: int, meet: weights_pb2.Rendezvous, configuration: str = STANDBY) -> int:
        request = pb.ReceiveStateRequest(job_id=JOB, configuration=configuration, version=version, rendezvous=meet)
        return self.standby.calls.call(TrainerRpc.ReceiveState, request).version

    def receiving(self, version: int, meet: weights_pb2.Rendezvous) -> "Future[Any]":
        return self.standby.running.in_background(lambda: self.receive(version, meet))

    def state(self, of: TwoRanks, name: str) -> dict[str, torch.Tensor]:
        of.calls.save(str(self.folder / name))
        files = sorted((self.folder / name / "state").iterdir())
        return {key: tensor for file in files for key, tensor in load_file(file).items()}


@pytest.fixture
def pair(served: ScriptedCoordinator, tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as running:
        yield Pair(served, tmp_path, running)


@pytest.mark.parametrize("backend", ["fsdp2", pytest.param("megatron", marks=pytest.mark.matrix)])
def test_a_copy_is_the_state_bit_for_bit_or_nothing(pair: Pair, tied_model: Path, backend: str) -> None:
    pair.configure(job_spec(tied_model, trainer={"backend": backend, "optimizer": OPTIMIZER}, algorithm=KL))
    pair.step(1)
    meet = pair.send(1)
    pair.step(2)  # while version 1 is on its way
    assert pair.receive(1, meet) == pair.standby.calls.status().version == 1
    assert pair.receive(1, meet) == 1, "repeated"
    with pytest.raises(Fenced, match="another loading"):
        pair.receive(2, meet, "another")
    with pytest.raises(Fenced, match="cannot be copied"):
        pair.send(1)

    # A copy of another version than was asked for is not put in place, and the next one is.
    with pytest.raises(InvalidState, match="other parts"):
        pair.receive(3, pair.send(2))
    assert pair.standby.calls.status().version == 1
    assert pair.receive(2, pair.send(2)) == 2
    there, here = pair.state(pair.seat, "there"), pair.state(pair.standby, "here")
    assert any("exp_avg_sq" in name for name in here) and equal(there, here)
    third, again = pair.step(3), pair.step(3, pair.standby)
    assert third["actor/grad_norm"] == again["actor/grad_norm"]
    assert third["actor/kl_coef"] == again["actor/kl_coef"] != pytest.approx(0.2)


STATES: dict[str, dict[str, Any]] = {
    "moments on the host": {"trainer": {"backend_options": {"offload_optimizer": True}}},
    "adapters": {"model": {"lora": {"rank": 4}}},
    "critic": {"algorithm": {"preset": "ppo", "critic": {}}},
}


@pytest.mark.parametrize("parts", [pytest.param(parts, id=name) for name, parts in STATES.items()])
def test_every_state_goes_on_in_the_other_trainer_as_in_the_first(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path, parts: dict[str, Any]
) -> None:
    """Before the first update, and after one: the other one has no moments until then."""
    merged = {**parts, "trainer": {"optimizer": OPTIMIZER, **parts.get("trainer", {})}}
    spec = job_spec(tied_model, **merged)
    (seat, step), (standby, again) = (local_step(spec, one_rank, control, served) for _ in range(2))
    sender, receiver = StandbyCopies(0), StandbyCopies(0)
    for version in (0, 1, 2):
        if version:
            step(version, random_groups(4, 4, seed=version))
        (meet,) = sender.send(seat, Version(version), 0.1, 1, 60.0)
        receiver.put_in_place(standby, receiver.receive(meet, Version(version), standby, 60.0))
        assert equal(held(seat), held(standby))
        assert standby.updates == seat.updates
        sender.close()
    for train in (step, again):
        train(3, random_groups(4, 4, seed=3))
    assert equal(held(seat), held(standby))


def held(backend: Backend) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor] = {}
    for prefix, model in models(backend).items():
        parts |= {key: part.clone() for key, part in keyed_parts(prefix, model.state()).items()}
    return parts


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def kill_in_the_middle(pair: Pair, rng: random.Random) -> str:
    """Kills ranks of the seat at a random instant of a copy; returns which version the other one holds then."""
    states = {}
    for version in (1, 2):
        pair.step(version)
        states[version] = pair.state(pair.seat, f"version-{version}")
        if version == 1:
            assert pair.receive(1, pair.send(1)) == 1
    ranks = rng.sample(pair.seat.running.ranks(), rng.choice([1, 2]))
    receiving = pair.receiving(2, pair.send(2))
    time.sleep(rng.uniform(0.0, COPY_S))
    for rank in ranks:
        rank.kill()
    try:
        held = receiving.result(2 * STALL_S)
    except PublicationFailed:
        held = 1
    assert pair.standby.calls.status().version == held
    assert equal(pair.state(pair.standby, "held"), states[held])
    return f"{len(ranks)} of 2 ranks killed: holds {held}"


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.matrix)])
def test_no_part_of_a_copy_is_taken(served: ScriptedCoordinator, tied_model: Path, tmp_path: Path, kills: int) -> None:
    rng = random.Random(f"instants {kills}")
    for number in range(kills):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ExitStack() as running:
            pair = Pair(served, folder, running, module="tests.services.trainer.checkpoints.slow_copies")
            pair.configure(job_spec(tied_model, trainer={"optimizer": OPTIMIZER}))
            print(kill_in_the_middle(pair, rng))


def test_one_that_is_stopped_costs_nothing(pair: Pair, tied_model: Path) -> None:
    """The copy is dropped, and the next one that arrives is whole."""
    pair.configure(job_spec(tied_model, trainer={"optimizer": OPTIMIZER}))
    pair.step(1)
    began = time.monotonic()
    pair.step(2)
    step_s = time.monotonic() - began
    ranks = pair.standby.running.ranks()
    for rank in ranks:
        rank.suspend()
    began = time.monotonic()
    meet = pair.send(2)
    copied_s = time.monotonic() - began
    receiving = pair.receiving(2, meet)
    began = time.monotonic()
    pair.step(3)
    stopped_s = time.monotonic() - began
    print(f"step {step_s:.3f} s, with a stopped one {stopped_s:.3f} s, copied in {copied_s:.3f} s")
    assert copied_s < 1.0 and stopped_s < step_s + 1.0
    assert not receiving.done()
    began = time.monotonic()
    meet = pair.send(3)
    assert time.monotonic() - began < STALL_S + JOIN_S + 1.0, "the copy before was given up"
    for rank in ranks:
        rank.resume()
    with pytest.raises(MillraceError):
        receiving.result(60)
    assert pair.receive(3, meet) == 3
    assert equal(pair.state(pair.seat, "there"), pair.state(pair.standby, "here"))
