"""A replica goes from one job to the next: seconds until the next job's first lease, with its engine kept and not.

    python -m benchmarks.moving --rounds 3

One stack: a trainer and a replica with vLLM. Each job trains one step. In turn comes a job on a copy of the model's
folder, for which the replica keeps its engine, and one with another `max_num_seqs`, for which it starts another.
Prints JSON: of each job the seconds from its start until its first prompt is leased, and those of the replica alone,
from when it was asked until its engine was ready. The first job finds a replica without an engine.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.replica import made_model
from benchmarks.stacks import letters_job, stack_in
from millrace.client import Client
from millrace.events import JobMoved, MemberConfigured, MemberJoined
from millrace.rest import JobState

SLOTS = 32
"""`max_num_seqs` of the first job."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        print(json.dumps(measure(Path(folder), options), indent=2))


def job(folder: Path, name: str, slots: int) -> dict[str, Any]:
    model = folder / f"model-{name}"
    shutil.copytree(folder / "model", model)
    return letters_job(
        folder,
        name=name,
        output=str(folder / f"output-{name}"),
        model={"path": str(model)},
        reward={"function": "exact", "workers": 1},
        rollout={
            "samples_per_prompt": 4,
            "max_response_tokens": 16,
            "dtype": "float32",
            "engine_options": {"vllm": {"max_num_seqs": slots, "max_model_len": 64, "enforce_eager": True}},
        },
        trainer={"dtype": "float32", "token_budget": 4096},
        schedule={"steps": 1, "prompts_per_step": 4},
        deadlines={"configure_s": 300, "step_s": 120, "publication_s": 60, "save_s": 60, "no_replica_s": 300},
    )


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    (folder / "model").mkdir()
    made_model(folder / "model")
    jobs, slots = [("first", SLOTS)], SLOTS
    for number in range(options.rounds):
        jobs.append((f"kept-{number}", slots))
        slots += 1
        jobs.append((f"another-{number}", slots))
    found: dict[str, dict[str, Any]] = {}
    with stack_in(folder / "stack") as (_, client):
        for name, each in jobs:
            found[name] = followed(client, job(folder, name, each), options.limit_s)
    for figures in found.values():
        assert figures["kept_engine"] == (figures is not found["first"] and not figures["engine_changes"])
    ways = {
        "kept": [one for one in found.values() if one["kept_engine"]],
        "another": [one for one in found.values() if one["engine_changes"]],
    }
    medians = {
        figure: {way: statistics.median(one[figure] for one in of) for way, of in ways.items()}
        for figure in ("to_first_lease_s", "replica_ready_s")
    }
    return {"medians": medians, "jobs": found}


def followed(client: Client, spec: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """The figures of one job, which is run to its end."""
    job_id, until, leased_s = client.submit(spec).id, time.monotonic() + limit_s, 0.0
    while (view := client.job(job_id)).state not in (JobState.SUCCEEDED, JobState.FAILED):
        if not leased_s and (ledger := client.ledger(job_id)).issued > ledger.queued:
            leased_s = time.time()
        if time.monotonic() > until:
            raise TimeoutError(f"{job_id} is {view.state} after {limit_s} s")
        time.sleep(0.02)
    if view.state is JobState.FAILED:
        raise RuntimeError(f"the job failed: {view.failure}")
    events = list(client.events(job_id, follow=False))
    at = {type(event.data): event.time_s for event in reversed(events)}  # of the first of each kind
    configured = next(event.data for event in events if isinstance(event.data, MemberConfigured))
    began_s = next(
        event.time_s for event in events if isinstance(event.data, JobMoved) and event.data.state is JobState.STARTING
    )
    return {
        "to_first_lease_s": round(leased_s - began_s, 2),
        "replica_ready_s": round(at[MemberConfigured] - at[MemberJoined], 2),
        "kept_engine": configured.kept_engine,
        "engine_changes": configured.engine_changes,
    }


if __name__ == "__main__":
    main()
