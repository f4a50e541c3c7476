"""This project on the peers' work: a job for each case, on a stack that is started once."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.work import (
    ANSWER_TOKENS,
    ANSWERS,
    CONTEXT,
    LEARNING_RATE,
    PROMPT_TOKENS,
    PROMPTS,
    TOKEN_BUDGET,
    figures,
)
from benchmarks.stacks import stack_in
from millrace.cli.settings import changes_of
from millrace.demo.run import ENVIRONMENT
from millrace.rest import ENDED
from millrace.spec import JobSpec, parse
from millrace.spec.document import merged

CASES = {
    "staleness-0": ["schedule.max_staleness=0", "trainer.streaming=false"],
    "staleness-0-streaming": ["schedule.max_staleness=0", "trainer.streaming=true"],
    "staleness-1": ["schedule.max_staleness=1", "trainer.streaming=false"],
    "staleness-1-in-order": ["schedule.max_staleness=1", "schedule.wait_for_slow=true", "trainer.streaming=true"],
    "staleness-1-carried": [
        "schedule.max_staleness=1",
        "schedule.too_stale=train",
        "algorithm.correction.name=tis_token",
        f"schedule.carried_prompts={PROMPTS}",
        "trainer.streaming=true",
    ],
}
"""Fields of the spec as `millrace submit --set` has them."""
CANCEL_S = 60.0
"""How long it is waited for the end of a job that was cancelled."""
SHOWN = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/train",
    "timing_s/fetch",
    "timing_s/old_log_prob",
    "timing_s/adv",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "training/staleness/mean",
    "training/staleness/max",
    "response_length/mean",
    "response_length/max",
    "perf/mfu/actor",
    "perf/max_memory_reserved_gb",
    "rollout_corr/k3_kl/same_version",
)


def run_ours(
    work: Path, cases: Sequence[str], steps: int, limit_s: float, backend: str, more: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yields a row for each case, until `limit_s` are over."""
    until = time.monotonic() + limit_s
    with stack_in(work / f"stack-{time.time_ns()}", environment=ENVIRONMENT) as (_, client):
        for case in cases:
            if until - time.monotonic() < 60:
                return
            begun = time.monotonic()
            # The job would train longer, so that its last checkpoint is not part of the run.
            job = client.submit(job_of(work, steps + 8, backend, [*CASES[case], *more]))
            while len(rows := client.metrics(job.id)) < steps and time.monotonic() < until:
                if (job := client.job(job.id)).state in ENDED:
                    break
                time.sleep(0.5)
            if len(rows) < 3:
                yield {"system": "millrace", "case": case, "failure": str(job.failure or job.state)}
                return
            if job.state not in ENDED:
                client.cancel(job.id)
                client.wait(job.id, CANCEL_S)
            seen = {row.step: (row.time_s - job.created_s, row.values) for row in rows}
            took = {"backend": backend, "job_s": round(time.monotonic() - begun, 1)}
            yield {"system": "millrace", "case": case, **took, **figures(seen, SHOWN)}


def job_of(work: Path, steps: int, backend: str, changes: Sequence[str]) -> JobSpec:
    tree: dict[str, Any] = {
        "name": "peers",
        "output": str(work / f"output-{time.time_ns()}"),
        "model": {"path": str(work / "model")},
        "data": {"files": [str(work / "rows.jsonl")], "max_prompt_tokens": PROMPT_TOKENS, "shuffle": False},
        "reward": {"function": f"{work / 'reward.py'}:compute_score", "workers": 4},
        "rollout": {
            "samples_per_prompt": ANSWERS,
            "max_response_tokens": ANSWER_TOKENS,
            "temperature": 1.0,
            "engine_options": {
                "vllm": {"max_model_len": CONTEXT, "max_num_seqs": 512, "gpu_memory_utilization": 0.8},
            },
        },
        "algorithm": {"advantage": {"name": "grpo"}},
        "trainer": {"backend": backend, "token_budget": TOKEN_BUDGET, "optimizer": {"lr": LEARNING_RATE}},
        "schedule": {"steps": steps, "prompts_per_step": PROMPTS},
        "deadlines": {"configure_s": 600, "step_s": 600, "no_replica_s": 600},
    }
    return parse(merged(tree, changes_of(changes)))
