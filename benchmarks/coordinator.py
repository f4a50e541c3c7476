"""What the coordinator costs: processor time for each trajectory that is leased, completed, fetched and marked as
trained, and seconds of a publication's control.

    python -m benchmarks.coordinator --replicas 2 --samples 8 --tokens 1000
    python -m benchmarks.coordinator --replicas 1000 --processes 4 --prompts-per-replica 4

Everything is real but the engines and the training: a coordinator with its Redis, and simulated replicas and a trainer
in processes of their own that speak gRPC with it. Prints one JSON object. All of them share this machine's cores, so
processor time says more than seconds.
"""

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import psutil

from millrace.contracts.methods import FleetRpc, WorkRpc
from millrace.contracts.v1 import common_pb2, fleet_pb2, rollout_pb2, weights_pb2, work_pb2
from millrace.data.row import PromptRow, write_rows
from millrace.errors import MillraceError, NotFound
from millrace.rest import ENDED, JobState
from millrace.weights.plans import wire_layouts
from millrace.wire import channel
from millrace.wire.arrays import pack_logprobs, pack_tokens
from millrace.wire.channel import PROTOCOL_VERSION
from millrace.wire.server import Server
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.services.coordinator.peers import MANIFEST, Shape, SimulatedReplica, SimulatedTrainer

WARM_UP_STEPS = 2
METER_S = 0.05


HEARTBEAT_S = 1.0
WAIT_S = 25.0
"""How long a replica's request for leases waits; as in `services/rollout/work/leases.py`."""
PATIENCE = ("--heartbeat-s", str(HEARTBEAT_S), "--lost-after-s", "60")
"""Options of the coordinator: on a busy machine nobody is lost."""


class FastReplica(SimulatedReplica):
    """Answers at once with random tokens that were made beforehand; versions and rewards are each group's own.

    The replicas of one process share the gRPC server of the first, at loopback addresses of their own, and its version.
    """

    def __init__(self, coordinator: str, shape: Shape, first: Self | None = None, number: int = 0) -> None:
        self._first = first or self
        self._held = -1
        self._number = number
        super().__init__(coordinator, shape)
        chance = random.Random(os.getpid())
        self._tokens = pack_tokens([chance.randrange(150_000) for _ in range(shape.tokens)])
        self._logprobs = pack_logprobs([-chance.random() for _ in range(shape.tokens)])
        self._text = "".join(chance.choice("abcdefghij     ") for _ in range(4 * shape.tokens))

    @property
    def version(self) -> int:
        return self._first._held

    @version.setter
    def version(self, version: int) -> None:
        self._first._held = version

    async def start(self) -> None:
        if self._first is self:
            self.server = Server(self.servicers(), "0.0.0.0", 0)
            await self.server.start()
        await self.register()
        self._tasks = [asyncio.create_task(work) for work in (self._beat(), self._pull())]

    async def register(self) -> None:
        request = fleet_pb2.RegisterRequest(
            member_id=self.id,
            kind=self.kind,
            address=f"127.0.{self._number // 250}.{self._number % 250 + 1}:{self._first.server.port}",
            protocol_version=PROTOCOL_VERSION,
            engine=self.engine,
            world_size=1,
            host="bench",
            device="cpu",
        )
        await self.coordinator.call(FleetRpc.Register, request)

    def _trajectory(self, lease: work_pb2.Lease) -> common_pb2.Trajectory:
        return common_pb2.Trajectory(
            tokens=self._tokens,
            logprobs=self._logprobs,
            versions=[common_pb2.VersionSpan(version=self.version, start=0, end=self.shape.tokens)],
            stop_reason=common_pb2.STOP_REASON_END_OF_TURN,
            text=self._text,
            reward=self._chance.random(),
        )

    async def PreparePublication(
        self, request: rollout_pb2.PrepareReceiveRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.PrepareReceiveResponse:
        """As every replica computes the same plan, each process computes it once."""
        if not request.HasField("manifest"):
            if request.begin:
                await self._begin(request)
            return rollout_pb2.PrepareReceiveResponse(plan_hash=request.plan_hash, begun=request.begin)
        return rollout_pb2.PrepareReceiveResponse(plan_hash=_plan_hash(request.sides.SerializeToString()))

    async def _beat(self) -> None:
        interval_s = HEARTBEAT_S
        while True:
            await asyncio.sleep(interval_s)
            beat = fleet_pb2.HeartbeatRequest(
                member_id=self.id, version=self.version, tokens=self.tokens, running=self.running
            )
            try:
                interval_s = (await self.coordinator.call(FleetRpc.Heartbeat, beat)).heartbeat_s or HEARTBEAT_S
            except NotFound:
                await self.register()
            except MillraceError:
                continue

    async def _pull(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                free = self.shape.capacity - self.running
                if free < self.shape.samples:
                    await asyncio.sleep(0.01)
                    continue
                request = work_pb2.LeaseRequest(member_id=self.id, free_samples=free, wait_s=WAIT_S)
                try:
                    answer = await self.coordinator.call(WorkRpc.Lease, request)
                except MillraceError:
                    await asyncio.sleep(0.5)
                    continue
                for lease in answer.leases:
                    self.running += lease.sampling.samples
                    tasks.create_task(self._answer(lease))


@functools.lru_cache(maxsize=4)
def _plan_hash(layouts: bytes) -> bytes:
    return wire_layouts.Planner().plan(MANIFEST, weights_pb2.Sides.FromString(layouts)).hash


@dataclass
class FastShape(Shape):
    """See `Shape`."""

    samples: int = 8
    """Of one prompt: a replica asks for leases when it has room for these."""


def train(coordinator: str) -> None:
    """A trainer in this process, until it is killed."""

    async def forever() -> None:
        await SimulatedTrainer(coordinator).start()
        await asyncio.Event().wait()

    asyncio.run(forever())


def generate(coordinator: str, shape: Shape, count: int) -> None:
    """`count` replicas in this process, until it is killed."""

    # Channels of one process to the same address share a connection; replicas have one each.
    channel.OPTIONS.append(("grpc.use_local_subchannel_pool", 1))

    async def forever() -> None:
        first = FastReplica(coordinator, shape)
        await first.start()
        for number in range(1, count):
            await FastReplica(coordinator, shape, first, number).start()
        await asyncio.Event().wait()

    asyncio.run(forever())


def _asked(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {number} " * 20}]


def job(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "model.safetensors").write_bytes(b"")
    rows = [PromptRow(n, "bench", _asked(n), ground_truth=str(n)) for n in range(options.prompts * 4)]
    write_rows(folder / "rows.parquet", rows)
    longest = options.tokens + 1024
    return {
        "name": "bench",
        "output": str(folder / "out"),
        "model": {"path": str(model)},
        "data": {"files": [str(folder / "rows.parquet")]},
        "reward": {"function": "exact"},
        "rollout": {"samples_per_prompt": options.samples, "max_response_tokens": options.tokens},
        "trainer": {"token_budget": longest},
        "schedule": {"steps": options.steps, "prompts_per_step": options.prompts, "max_staleness": 1},
    }


def measure(coordinator: CoordinatorProcess, spec: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    with Meter(coordinator) as meter:
        submitted = coordinator.client.submit(spec)
        while (done := coordinator.client.job(submitted.id)).state not in ENDED:
            time.sleep(2.0)
    if done.state is not JobState.SUCCEEDED:
        raise SystemExit(f"{done.failure}\n{coordinator.log()[-5000:]}")
    rows = [row for row in coordinator.client.metrics(submitted.id) if row.step >= WARM_UP_STEPS]
    steps, start, end = len(rows) - 1, meter.at(rows[0].time_s), meter.at(rows[-1].time_s)
    trajectories = steps * options.prompts * options.samples
    publications = [row.values["timing_s/update_weights"] for row in rows[:-1]]
    seconds = (rows[-1].time_s - rows[0].time_s) / steps
    return {
        "replicas": options.replicas,
        "prompts_per_step": options.prompts,
        "samples_per_prompt": options.samples,
        "tokens_per_trajectory": options.tokens,
        "steps": steps,
        "processor_s_per_1000_trajectories": {
            name: (end[name] - start[name]) / trajectories * 1000 for name in ("coordinator", "redis")
        },
        "processor_s_per_step": sum(end[name] - start[name] for name in end) / steps,
        "processor_s_until_warm": sum(start.values()) - sum(meter.at(0.0).values()),
        "publication_s": statistics.median(publications),
        "publication_slowest_s": max(publications),
        "replicas_published_to": min(row.values["publication/replicas"] for row in rows[:-1]),
        "seconds_per_step": seconds,
        "groups_per_s": options.prompts / seconds,
        "trajectories_per_s": options.prompts * options.samples / seconds,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": options.load,
        "python": platform.python_version(),
    }


class Meter:
    """Processor seconds of the coordinator and its Redis over time, read from outside."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._coordinator = coordinator
        self._read: list[tuple[float, dict[str, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(METER_S):
            self._read.append((time.time(), processor_s(self._coordinator)))

    def at(self, time_s: float) -> dict[str, float]:
        """The last reading before the Unix time `time_s`, or the first one."""
        return next((spent for at, spent in reversed(self._read) if at <= time_s), self._read[0][1])

    def __enter__(self) -> Self:
        self._read.append((time.time(), processor_s(self._coordinator)))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def processor_s(coordinator: CoordinatorProcess) -> dict[str, float]:
    """Processor time that the coordinator and its Redis took so far: a figure that a busy machine does not spoil."""
    assert coordinator.process is not None
    process = psutil.Process(coordinator.process.pid)
    (redis,) = [child for child in process.children() if "redis" in child.name()]
    return {name: sum(each.cpu_times()[:2]) for name, each in (("coordinator", process), ("redis", redis))}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2, help="that the replicas share")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=128, help="a step")
    parser.add_argument("--prompts-per-replica", type=int, help="a step, instead of --prompts")
    parser.add_argument("--samples", type=int, default=8, help="of one prompt")
    parser.add_argument("--tokens", type=int, default=1000, help="of one trajectory")
    options = parser.parse_args()
    options.load = os.getloadavg()[0]
    if options.prompts_per_replica:
        options.prompts = options.prompts_per_replica * options.replicas
    return options


def main() -> None:
    options = _options()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, running(Path(name) / "state", *PATIENCE) as coordinator:
        shape = FastShape(tokens=options.tokens, capacity=16 * options.samples, samples=options.samples)
        share, extra = divmod(options.replicas, options.processes)
        shares = [share + (n < extra) for n in range(options.processes)]
        members = [context.Process(target=train, args=(coordinator.address,))]
        members += [
            context.Process(target=generate, args=(coordinator.address, shape, count)) for count in shares if count
        ]
        try:
            for member in members:
                member.start()
            _joined(coordinator, options.replicas)
            print(json.dumps(measure(coordinator, job(Path(name), options), options), indent=2))
        finally:
            for member in (m for m in members if m.is_alive()):
                member.kill()


def _joined(coordinator: CoordinatorProcess, replicas: int) -> None:
    """Waits until all members are in the fleet."""
    deadline = time.monotonic() + 600.0
    while len((fleet := coordinator.client.fleet()).replicas) < replicas or not fleet.trainers:
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(fleet.replicas)} of {replicas} replicas joined\n{coordinator.log()[-5000:]}")
        time.sleep(1.0)


if __name__ == "__main__":
    main()
