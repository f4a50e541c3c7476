"""How many groups a second go through the coordinator: leased, completed, fetched, marked as trained.

    python -m benchmarks.coordinator --replicas 2 --samples 8 --tokens 1000

Everything is real but the engines and the training: a coordinator with its Redis, and simulated replicas and a trainer
in processes of their own that speak gRPC with it. Prints one JSON object. All of them share this machine's cores.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import tempfile
from pathlib import Path
from typing import Any

import psutil

from millrace.data.row import PromptRow
from millrace.data.write import write_rows
from millrace.rest import JobState
from millrace.wire.arrays import pack_logprobs, pack_tokens
from millrace.wire.v1 import common_pb2, work_pb2
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.services.coordinator.peers import Shape, SimulatedReplica, SimulatedTrainer

WARM_UP_STEPS = 2


class FastReplica(SimulatedReplica):
    """Answers at once with random tokens that were made beforehand; versions and rewards are each group's own."""

    def __init__(self, coordinator: str, shape: Shape) -> None:
        super().__init__(coordinator, shape)
        chance = random.Random(os.getpid())
        self._tokens = pack_tokens([chance.randrange(150_000) for _ in range(shape.tokens)])
        self._logprobs = pack_logprobs([-chance.random() for _ in range(shape.tokens)])
        self._text = "".join(chance.choice("abcdefghij     ") for _ in range(4 * shape.tokens))

    def _trajectory(self, lease: work_pb2.Lease) -> common_pb2.Trajectory:
        return common_pb2.Trajectory(
            tokens=self._tokens,
            logprobs=self._logprobs,
            versions=[common_pb2.VersionSpan(version=self.version, start=0, end=self.shape.tokens)],
            stop_reason=common_pb2.STOP_REASON_END_OF_TURN,
            text=self._text,
            reward=self._chance.random(),
        )


def serve(member: type[SimulatedReplica] | type[SimulatedTrainer], *arguments: Any) -> None:
    """A member in this process, until it is killed."""

    async def forever() -> None:
        await member(*arguments).start()
        await asyncio.Event().wait()

    asyncio.run(forever())


def job(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    rows = [PromptRow(n, "bench", f"question {n} " * 20, ground_truth=str(n)) for n in range(options.prompts * 4)]
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
    before = _processor_s(coordinator)
    submitted = coordinator.client.submit(spec)
    done = coordinator.client.wait(submitted.id, 600.0)
    if done.state is not JobState.SUCCEEDED:
        raise SystemExit(f"{done.failure}\n{coordinator.log()}")
    spent = {name: seconds - before[name] for name, seconds in _processor_s(coordinator).items()}
    thousands = options.steps * options.prompts * options.samples / 1000
    rows = coordinator.client.metrics(submitted.id)[WARM_UP_STEPS - 1 :]
    groups = options.prompts * (len(rows) - 1)
    seconds = rows[-1].time_s - rows[0].time_s
    return {
        "groups_per_s": groups / seconds,
        "trajectories_per_s": groups * options.samples / seconds,
        "tokens_per_s": groups * options.samples * options.tokens / seconds,
        "processor_s_per_1000_trajectories": {name: seconds / thousands for name, seconds in spent.items()},
        "seconds": seconds,
        "steps": len(rows) - 1,
        "prompts_per_step": options.prompts,
        "samples_per_prompt": options.samples,
        "tokens_per_trajectory": options.tokens,
        "replicas": options.replicas,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": options.load,
        "python": platform.python_version(),
    }


def _processor_s(coordinator: CoordinatorProcess) -> dict[str, float]:
    """Processor time that the coordinator and its Redis took so far: a figure that a busy machine does not spoil."""
    assert coordinator.process is not None
    process = psutil.Process(coordinator.process.pid)
    (redis,) = [child for child in process.children() if "redis" in child.name()]
    return {name: sum(each.cpu_times()[:2]) for name, each in (("coordinator", process), ("redis", redis))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=128, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="of one prompt")
    parser.add_argument("--tokens", type=int, default=1000, help="of one trajectory")
    options = parser.parse_args()
    options.load = os.getloadavg()[0]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, running(Path(name) / "state") as coordinator:
        shape = Shape(tokens=options.tokens, capacity=16 * options.samples)
        members = [context.Process(target=serve, args=(SimulatedTrainer, coordinator.address))]
        members += [
            context.Process(target=serve, args=(FastReplica, coordinator.address, shape))
            for _ in range(options.replicas)
        ]
        try:
            for member in members:
                member.start()
            print(json.dumps(measure(coordinator, job(Path(name), options), options), indent=2))
        finally:
            for member in (m for m in members if m.is_alive()):
                member.kill()


if __name__ == "__main__":
    main()
