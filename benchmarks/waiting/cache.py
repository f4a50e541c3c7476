"""What it saves to hold episodes back while the engine's cache is too small for all that are open.

    python -m benchmarks.waiting.cache --blocks 64 --episodes 32

One replica with vLLM, a model with random weights, and an environment that answers each turn with a long text after a
random wait (exponential, of the mean --wait-s). Rounds in which all episodes go on and rounds in which the replica
admits them by its cache in turn, of the same prompts. The limit of the second kind begins at --episodes in the first
round and goes on from round to round, as in a job. Prints one JSON object: for each round the share of the earlier
turns' tokens that were computed again, and its seconds for each episode.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import config_of, random_model
from benchmarks.waiting.__main__ import LONGEST_ROUND_S, waiting_job, working
from millrace.demo.tokenizer import byte_tokenizer
from millrace.megatron.architectures.published import qwen3
from millrace.spec import JobSpec
from millrace.telemetry import logs
from services.rollout.episode.admission import Admission
from services.rollout.replica import Replica
from tests.services.rollout.coordinator import Coordinator, until

ANSWER = "The tool found nothing there. Look at another place, and say what you found. "
KINDS = ("all go on", "by the cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64, help="of 128 tokens, in vLLM's cache")
    parser.add_argument("--episodes", type=int, default=32, help="that may be open at once")
    parser.add_argument("--prompts", type=int, default=12, help="in a round")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=16, help="longest turn")
    parser.add_argument("--given", type=int, default=240, help="tokens of an answer of the environment")
    parser.add_argument("--wait-s", type=float, default=0.3, help="mean of a wait")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind")
    options = parser.parse_args()
    logs.configure("bench")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        print(json.dumps(asyncio.run(measure(made_model(Path(folder)), options)), indent=2))


def made_model(folder: Path) -> Path:
    """A Qwen3 of about 3 million parameters: a long prompt takes a CPU longer than the replica's own work."""
    random_model(folder, config_of(qwen3(4, 256, 768, 4, 2, sizes=(64, len(byte_tokenizer()), 32768))), "float32")
    return folder


def job(model: Path, options: argparse.Namespace) -> JobSpec:
    response = options.turns * (options.tokens + options.given + 40)
    waits = {"wait_s": options.wait_s, "answer": (ANSWER * options.given)[: options.given]}
    engine = {"num_gpu_blocks_override": options.blocks, "max_num_seqs": options.episodes}
    return waiting_job(model, options, waits, engine, prompt=64, response=response)


async def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    async with working("vllm", job(model, options)) as (replica, coordinator):
        assert replica.engine is not None
        by_cache = replica.leases.admission
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind in KINDS:
                replica.leases.admission = by_cache if kind == "by the cache" else Admission()
                found[kind].append(await one_round(replica, coordinator, options))
        return {
            "engine": f"vllm {replica.engine.release} on {replica.engine.device}",
            "cores": os.cpu_count(),
            "slots": replica.engine.capacity,
            "options": {name: str(value) for name, value in vars(options).items()},
            "rounds": found,
        }


async def one_round(replica: Replica, coordinator: Coordinator, options: argparse.Namespace) -> dict[str, float]:
    coordinator.groups.clear()
    assert replica.job is not None and replica.engine is not None
    response, started = replica.job.spec.rollout.max_response_tokens, time.perf_counter()
    before, admission = replica.engine.stats(), replica.leases.admission
    prefix, cached = admission.prefix_tokens, admission.cached_prefix_tokens
    for number in range(options.prompts):
        prompt = [{"role": "user", "content": f"question {number}"}]
        coordinator.issue(number, prompt, "waits", samples=options.samples, max_response_tokens=response)
    await until(lambda: coordinator.answered == options.prompts, LONGEST_ROUND_S)
    assert not coordinator.dropped, coordinator.dropped
    seconds, after = time.perf_counter() - started, replica.engine.stats()
    prefix, cached = admission.prefix_tokens - prefix, admission.cached_prefix_tokens - cached
    accounts = [t.account for g in coordinator.groups.values() for t in g.trajectories if t.HasField("account")]
    assert len(accounts) == options.prompts * options.samples and after is not None
    return {
        "seconds": round(seconds, 1),
        "seconds_an_episode": round(seconds / len(accounts), 3),
        "computed_again": round(1 - cached / prefix, 3),
        "prefix_tokens": prefix,
        "preempted": after.preempted - (0 if before is None else before.preempted),
        "open_at_an_end": round(sum(one.open_episodes for one in accounts) / len(accounts), 1),
        "limit_at_last": admission.limit or 0,
        "held_back_s": round(sum(one.held_back_s for one in accounts) / len(accounts), 2),
    }


if __name__ == "__main__":
    main()
