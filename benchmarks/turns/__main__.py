"""A job with episodes of several turns beside one with answers of one turn, at equal sampled tokens.

    python -m benchmarks.turns --shape qwen3-1.7b --turns 3 --tokens 256

A model of a published shape with random weights and 512 tokens of vocabulary, a local stack with one trainer and one
replica: on a host with two GPUs one each. The other side of the conversation is written down. Prints a JSON object for
each job: medians over the steps after the first of tokens/s of generation, KL of engine and trainer over tokens of the
same version, turns, forks and seconds, and from vLLM's own counters the share of prompt tokens that its prefix cache
had.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.shapes import config_of, random_model
from benchmarks.stacks import finished, stack_in
from millrace.client import Client
from millrace.megatron.architectures.published import SHAPES, shape_of
from millrace.spec import JobSpec, parse

VOCABULARY = 512
ANSWER = "The tool found nothing there. Look at another place, and say what you found."
TOLD = (
    "rollout_corr/k3_kl/same_version",
    "rollout_corr/kl/same_version",
    "num_turns/mean",
    "num_trajectories/mean",
    "response/sampled_ratio",
    "timing_s/gen",
    "timing_s/step",
    "timing_s/update_actor",
    "perf/throughput",
    "perf/mfu/actor",
)
CACHE = re.compile(r"^millrace_engine_(prompt|cached_prompt)_tokens_total\S* ([0-9.e+]+)$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[n for n, s in SHAPES.items() if s.latent is None], default="qwen3-1.7b")
    parser.add_argument("--config", type=Path, help="a config.json, instead of a published shape")
    parser.add_argument("--turns", type=int, default=3, help="of an episode; with 1 only the job of one turn is run")
    parser.add_argument("--tokens", type=int, default=256, help="of a turn, at most")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="episodes of a prompt")
    parser.add_argument("--steps", type=int, default=4, help="of each job; the first is not counted")
    parser.add_argument("--backend", default="fsdp2")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="of vLLM, as JSON")
    parser.add_argument("--trainer-options", type=json.loads, default={}, help="fields of trainer, as JSON")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--share-gpus", action="store_true", help="as of millrace up: one GPU is enough")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        config = config_of(replace(shape_of(options.shape), vocabulary=VOCABULARY))
        random_model(folder / "model", json.loads(options.config.read_text()) if options.config else config)
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(row(n)) for n in range(options.prompts * 8)))
        with stack_in(folder / "stack", share_gpus=options.share_gpus) as (_, client):
            for turns in sorted({1, options.turns}):
                print(json.dumps(measured(client, job(folder, options, turns), turns)), flush=True)


def row(number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"Find place number {number} and say what is there."}]
    return {"data_source": "turns", "prompt": prompt, "reward_model": {"ground_truth": "nothing"}}


def job(folder: Path, options: argparse.Namespace, turns: int) -> JobSpec:
    """Both jobs sample as many tokens an episode; the one of several turns gets the other side's beside them."""
    sampled = options.turns * options.tokens
    environment: dict[str, Any] = {
        "name": f"{Path(__file__).with_name('environment.py')}:Scripted",
        "renderer": "default",
        "max_turns": turns,
        "max_turn_tokens": options.tokens,
        "options": {"turns": turns, "answer": ANSWER},
    }
    rollout: dict[str, Any] = {
        "samples_per_prompt": options.samples,
        "max_response_tokens": sampled + 128 * (turns - 1),
        "temperature": 1.0,
        "dtype": options.dtype,
        "engine_options": {"vllm": options.engine_options},
    }
    return parse(
        {
            "name": f"turns {turns}",
            "output": str(folder / f"output-{turns}"),
            "model": {"path": str(folder / "model")},
            "data": {"files": [str(folder / "rows.jsonl")], "max_prompt_tokens": 128},
            "reward": {"function": "exact", "workers": 1},
            "rollout": rollout | ({"environment": environment} if turns > 1 else {}),
            "algorithm": {"preset": "grpo"},
            "trainer": {
                "backend": options.backend,
                "dtype": options.dtype,
                "token_budget": 16384,
                "optimizer": {"lr": 1e-6},
                **options.trainer_options,
            },
            "schedule": {"steps": options.steps, "prompts_per_step": options.prompts, "max_staleness": 0},
            "deadlines": {"configure_s": 300, "step_s": 300, "no_replica_s": 300},
        }
    )


def measured(client: Client, spec: JobSpec, turns: int) -> dict[str, Any]:
    """Medians over the steps after the first. Raises RuntimeError where the job failed."""
    begun, counted = time.monotonic(), prefix_cache(client)
    rows = [row.values for row in client.metrics(finished(client, spec, 900.0).id)][1:]
    values = {key: statistics.median(row[key] for row in rows) for key in TOLD if all(key in row for row in rows)}
    sampled = [row["response_length/mean"] * row.get("response/sampled_ratio", 1.0) for row in rows]
    episodes = spec.schedule.prompts_per_step * spec.rollout.samples_per_prompt
    values["sampled tokens of an episode"] = statistics.median(sampled)
    values["sampled tokens/s of generation"] = statistics.median(
        episodes * tokens / row["timing_s/gen"] for tokens, row in zip(sampled, rows, strict=True)
    )
    asked, had = (after - before for after, before in zip(prefix_cache(client), counted, strict=True))
    if asked:
        values["share of prompt tokens in the prefix cache"] = had / asked
    return {"turns": turns, "job_s": time.monotonic() - begun, **values}


def prefix_cache(client: Client) -> tuple[float, float]:
    """Prompt tokens that vLLM looked for in its prefix cache so far, and those that were there."""
    counts = {"prompt": 0.0, "cached_prompt": 0.0}
    for member in client.fleet().replicas:
        if member.metrics_address:
            page = httpx.get(f"http://{member.metrics_address}/metrics", timeout=10.0, trust_env=False).text
            for name, value in CACHE.findall(page):
                counts[name] += float(value)
    return counts["prompt"], counts["cached_prompt"]


if __name__ == "__main__":
    main()
