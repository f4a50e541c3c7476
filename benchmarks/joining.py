"""A replica that joins a running job: how soon it serves, and how much slower the trainer is meanwhile.

    python -m benchmarks.joining --shape qwen3-8b --ranks 2

The model has random weights of a published shape, and the reward means nothing. Megatron runs on `--ranks` GPUs, one
replica on the next GPU, and from step 4 on another replica on the one after. On a host without GPUs, `--shape tiny`
runs over Gloo. Prints JSON: seconds from the start of the joiner's engine until it serves, the trainer's update time
before and while it joins, and how far the engine's probabilities are from the trainer's.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.shapes import config_of, random_model
from benchmarks.stacks import letters_job, stack_in, waited
from millrace.client import Client
from millrace.engines import ENGINE_NAMES
from millrace.events import PublicationDone
from millrace.local import child_processes
from millrace.local.host import visible_devices
from millrace.local.stack import Stack
from millrace.megatron.architectures.published import SHAPES, shape_of
from millrace.rest import JobState
from millrace.telemetry.metrics.catalogue import find
from millrace.telemetry.metrics.step.mismatch import MISMATCH_SUMMARY
from services.rollout.replica import CONFIGURED
from services.rollout.weights.receiver import VERSION_COMMITTED

JOINS_AT = 4
"""The step from which on another replica joins."""


@dataclass(frozen=True)
class JoinTimes:
    """Times of the replica that joined, in seconds since 1970."""

    engine_up: float
    serving: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[n for n, s in SHAPES.items() if s.latent is None], default="tiny")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer")
    parser.add_argument("--engine", choices=ENGINE_NAMES, default="vllm")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--steps", type=int, default=8, help="after the replica serves; in all with --alone")
    parser.add_argument("--tokens", type=int, default=128, help="longest response")
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--alone", action="store_true", help="nobody joins")
    parser.add_argument("--limit-s", type=float, default=500.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        print(json.dumps(measure(Path(folder), options), indent=2))


def job(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    return letters_job(
        folder,
        name=f"joining {options.shape}",
        rollout={
            "samples_per_prompt": 8,
            "max_response_tokens": options.tokens,
            "dtype": "bfloat16",
            "engine_options": options.engine_options,
        },
        trainer={
            "backend": "megatron",
            "dtype": "bfloat16",
            "token_budget": options.token_budget,
            "optimizer": {"lr": 1e-6},
        },
        schedule={"steps": 100_000, "prompts_per_step": 16, "max_staleness": 1},
        deadlines={"configure_s": 400, "step_s": 300, "publication_s": 60, "save_s": 300},
    )


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    random_model(folder / "model", config_of(shape_of(options.shape)))
    made_s = time.monotonic() - began
    devices = visible_devices()[options.ranks + 1 :]
    with stack_in(folder / "stack", ranks=options.ranks, engine=options.engine) as (stack, client):
        found = followed(stack, client, options, devices, job(folder, options))
    return {"shape": options.shape, "ranks": options.ranks, "engine": options.engine, "made_s": made_s, **found}


def followed(
    stack: Stack, client: Client, options: argparse.Namespace, devices: list[str], spec: dict[str, Any]
) -> dict[str, Any]:
    log, until = stack.options.folder / "logs" / "joiner.log", time.monotonic() + options.limit_s
    job_id = client.submit(spec).id
    joiner = None
    joined: JoinTimes | None = None
    try:
        if not options.alone:
            waited(lambda: _step(client, job_id) >= JOINS_AT, options.limit_s)
            argv = (sys.executable, "-m", "services.rollout", "--coordinator", stack.coordinator, "--port", "0")
            visible = {"CUDA_VISIBLE_DEVICES": devices[0]} if devices else {}
            environment = {**stack.options.environment, "MILLRACE_HOST": "127.0.0.1", **visible}
            with log.open("wb") as output:
                joiner = child_processes.start((*argv, "--engine", options.engine), environment, output)
            engine_up = waited(lambda: _logged_at(log, CONFIGURED), until - time.monotonic())
            serving = waited(lambda: _logged_at(log, VERSION_COMMITTED), until - time.monotonic())
            joined = JoinTimes(engine_up, serving)
        last = _step(client, job_id) + options.steps
        waited(lambda: _step(client, job_id) >= last, until - time.monotonic())
        return _figures(client, job_id, joined)
    finally:
        client.cancel(job_id)
        if joiner is not None:
            joiner.terminate()
            joiner.wait(60)


def _figures(client: Client, job_id: str, joined: JoinTimes | None) -> dict[str, Any]:
    rows = [row for row in client.metrics(job_id) if "timing_s/update_actor" in row.values]
    update = {row.step: row.values["timing_s/update_actor"] for row in rows}
    ended = {row.step: row.time_s for row in rows}
    first = sorted(update)[1:]  # the first step also compiles and connects
    while_joining = [
        step
        for step in first
        if joined and ended[step] > joined.engine_up and ended.get(step - 1, 0.0) < joined.serving
    ]
    quiet = [update[step] for step in first if step not in while_joining]
    joining = [update[step] for step in while_joining]
    publications = [e.data for e in client.events(job_id, follow=False) if isinstance(e.data, PublicationDone)]
    copies = [data for data in publications if data.source == "sibling"]
    return {
        "seconds_from_engine_to_serving": joined.serving - joined.engine_up if joined else None,
        "copied_from_a_sibling": bool(copies),
        "copy_s": copies[0].seconds if copies else None,
        "bytes": publications[-1].members[0].bytes,
        "update_s_quiet": statistics.median(quiet),
        "update_s_quiet_all": quiet,
        "update_s_while_joining": joining,
        "update_s_moved": statistics.mean(joining) / statistics.median(quiet) - 1 if joining else None,
        "publication_s": statistics.median(data.seconds for data in publications[1:]),
        "pause_s": [max(m.pause_s for m in data.members) for data in publications],
        "gen_s": statistics.median(row.values["timing_s/gen"] for row in rows),
        "mismatch": {
            name: [statistics.mean(values), max(values)]
            for name in sorted({name for row in rows for name in row.values if find(name) in MISMATCH_SUMMARY})
            for values in [[row.values[name] for row in rows if name in row.values]]
        },
    }


def _logged_at(log: Path, event: str) -> float | None:
    """When a service logged the event for the first time, in seconds since 1970; None where it has not yet."""
    for line in log.read_text(errors="replace").splitlines():
        if line[:1] == "{" and line[-1:] == "}" and (entry := json.loads(line))["event"] == event:
            return datetime.fromisoformat(entry["timestamp"]).timestamp()
    return None


def _step(client: Client, job_id: str) -> int:
    view = client.job(job_id)
    if view.state in (JobState.FAILED, JobState.CANCELLED):
        raise RuntimeError(f"the job {view.state}: {view.failure}")
    return view.step


if __name__ == "__main__":
    main()
