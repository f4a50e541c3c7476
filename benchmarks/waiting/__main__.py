"""How much generation the waiting of episodes costs: tokens a second with tools that wait, and with tools that do not.

    python -m benchmarks.waiting --engine vllm --wait-s 1.0

One replica with a real engine, the demo's model with random weights, and an environment of several turns, after each of
which the episode waits for a random time (exponential, of the mean --wait-s). Rounds with and without waiting in turn,
of the same prompts and longest turns. Tokens are counted while there are prompts to lease, from when an eighth of them
is answered: the beginning and the end of a round, when the engine is not full, are not what a running job sees. Prints
one JSON object.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.replica import RUNNING, made_model, serving
from millrace.spec import JobSpec, parse
from millrace.telemetry import logs
from services.rollout.replica import Replica
from tests.services.rollout.coordinator import Coordinator, until

LONGEST_ROUND_S = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--wait-s", type=float, default=1.0, help="mean of a wait")
    parser.add_argument("--prompts", type=int, default=256, help="in a round")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="longest turn")
    parser.add_argument("--running", type=int, default=64, help="slots of the engine")
    parser.add_argument("--episodes", type=int, default=512, help="that may be open at once")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind")
    options = parser.parse_args()
    logs.configure("bench")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        print(json.dumps(asyncio.run(measure(made_model(Path(folder)), options)), indent=2))


def job(model: Path, options: argparse.Namespace) -> JobSpec:
    given_tokens = 30  # what the chat format puts between two turns is shorter
    response = options.turns * (options.tokens + given_tokens)
    engine: dict[str, Any] = {{**RUNNING, "transformers": "max_num_seqs"}[options.engine]: options.running}
    return waiting_job(model, options, {"wait_s": options.wait_s}, engine, prompt=40, response=response)


def waiting_job(
    model: Path,
    options: argparse.Namespace,
    waits: dict[str, Any],
    engine: dict[str, Any],
    *,
    prompt: int,
    response: int,
) -> JobSpec:
    """A job of episodes in the environment `Waits`. `waits`: the options of the environment; `engine`: those of the
    engine; `prompt` and `response`: the most tokens of each."""
    environment = {
        "name": f"{Path(__file__).with_name('environment.py')}:Waits",
        "options": waits,
        "max_turns": options.turns,
        "max_turn_tokens": options.tokens,
        "processes": 1,
        "episodes_per_process": options.episodes,
    }
    return parse(
        {
            "name": "bench",
            "output": str(model / "output"),
            "model": {"path": str(model)},
            "data": {"files": ["rows.jsonl"], "max_prompt_tokens": prompt},
            "reward": {"function": "exact", "workers": 1},
            "rollout": {
                "dtype": "float32",
                "samples_per_prompt": options.samples,
                "max_response_tokens": response,
                "environment": environment,
                "engine_options": engine,
            },
            "trainer": {"token_budget": prompt + response},
        }
    )


async def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    async with working(options.engine, job(model, options)) as (replica, coordinator):
        return await rounds(replica, coordinator, options)


@asynccontextmanager
async def working(engine: str, spec: JobSpec) -> AsyncIterator[tuple[Replica, Coordinator]]:
    """A replica that serves version 1 of the job's model, and the coordinator that gives it work."""
    coordinator = Coordinator()
    try:
        async with serving(engine, spec, await coordinator.start()) as replica:
            yield replica, coordinator
    finally:
        await coordinator.stop()


async def rounds(replica: Replica, coordinator: Coordinator, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"none": [], "waits": []}
    for number in range(options.rounds + 1):
        for kind, kept in found.items():
            figures = await one_round(replica, coordinator, kind, options)
            if number:  # the first round warms up
                kept.append(figures)
    assert replica.engine is not None
    speed = {kind: statistics.median(each["tokens_per_s"] for each in kept) for kind, kept in found.items()}
    return {
        "engine": f"{options.engine} {replica.engine.release} on {replica.engine.device}",
        "cores": os.cpu_count(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "rounds": found,
        "tokens_per_s": {kind: round(value) for kind, value in speed.items()},
        "waits_over_none": round(speed["waits"] / speed["none"], 3),
    }


async def one_round(
    replica: Replica, coordinator: Coordinator, kind: str, options: argparse.Namespace
) -> dict[str, float]:
    coordinator.groups.clear()
    for number in range(options.prompts):
        prompt = [{"role": "user", "content": f"question {number}"}]
        response = replica.job.spec.rollout.max_response_tokens if replica.job else 0
        coordinator.issue(number, prompt, kind, samples=options.samples, max_response_tokens=response)
    await until(lambda: coordinator.answered >= options.prompts / 8, LONGEST_ROUND_S)
    before, started = replica.leases.generated_tokens, time.perf_counter()
    await until(lambda: not coordinator.waiting, LONGEST_ROUND_S)
    seconds, tokens = time.perf_counter() - started, replica.leases.generated_tokens - before
    await until(lambda: coordinator.answered == options.prompts, LONGEST_ROUND_S)
    assert not coordinator.dropped, coordinator.dropped
    return {"seconds": round(seconds, 2), "tokens": tokens, "tokens_per_s": round(tokens / seconds)}


if __name__ == "__main__":
    main()
