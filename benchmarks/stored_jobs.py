"""What a coordinator with many stored jobs takes to list them, to accept one more, and to answer Prometheus.

    python -m benchmarks.stored_jobs --jobs 10 1000 10000

The coordinator and its Redis are real processes; the jobs are written by the store itself, ten of them queued and the
others cancelled. Prints one JSON object for each number of jobs: seconds of wall clock and of processor time
(coordinator and Redis) of one request. The processor time says more on a busy machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.coordinator import job, processor_s
from millrace.ids import JobId, new_job_id
from millrace.rest import JobState
from millrace.spec import parse
from services.coordinator.redis_server import RedisServer
from services.coordinator.state.job import JobRecord
from services.coordinator.store import Store
from tests.services.coordinator.conftest import CoordinatorProcess, running

QUEUED = 10
REQUESTS = 9
LONGEST_S = 15.0
"""After this time no further request of the same kind is made."""
KEEP = {"MILLRACE_KEEP_JOBS": "100000"}


async def store_jobs(store: Store, spec: dict[str, Any], count: int, *, queued: int) -> JobId:
    """Stores `count` jobs, of which the last `queued` wait and the others are cancelled. Returns the id of the last."""
    spec_json, now = parse(spec).model_dump_json(), time.time()
    for number in range(count):
        record = JobRecord(
            id=new_job_id(),
            name=f"job {number}",
            state=JobState.QUEUED,
            spec_json=spec_json,
            created_s=now - count + number,
        )
        await store.jobs.create(record)
        if number < count - queued:
            await store.jobs.move(record.id, JobState.CANCELLED, "cancelled", finished_s=record.created_s)
    return record.id


async def fill(url: str, spec: dict[str, Any], count: int) -> None:
    store = Store(url)
    try:
        await store_jobs(store, spec, count, queued=QUEUED)
    finally:
        await store.close()


def cost(coordinator: CoordinatorProcess, request: Callable[[int], httpx.Response]) -> dict[str, float]:
    """Of one request: wall clock (median) and processor seconds (mean), size of the answer; and how many failed."""
    seconds, spent, size, failed = [], [], 0, 0
    while len(seconds) < REQUESTS and sum(seconds) < LONGEST_S:
        before, started = processor_s(coordinator), time.monotonic()
        answer = request(len(seconds))
        seconds.append(time.monotonic() - started)
        spent.append(sum(processor_s(coordinator).values()) - sum(before.values()))
        failed += not answer.is_success
        size = len(answer.content)
    figures = {"seconds": statistics.median(seconds), "processor_s": statistics.mean(spent), "bytes": size}
    return figures | {"requests": len(seconds), "failed": failed}


def measure(folder: Path, count: int) -> dict[str, Any]:
    """The figures with `count` stored jobs."""
    options = argparse.Namespace(prompts=16, tokens=100, samples=2, steps=1)
    spec = job(folder, options)
    with running(folder / "state", environment=KEEP) as coordinator:
        asyncio.run(fill(RedisServer(folder / "state" / "redis").url, spec, count))
        url = f"http://127.0.0.1:{coordinator.http_port}"
        with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as http:

            def submit(number: int) -> httpx.Response:
                return http.post("/v1/jobs", json={**spec, "output": f"{spec['output']}-{number}"})

            http.get("/healthz").raise_for_status()
            return {
                "jobs": count,
                "list": cost(coordinator, lambda _: http.get("/v1/jobs")),
                "metrics": cost(coordinator, lambda _: http.get("/metrics")),
                "submit": cost(coordinator, submit),
                "load": os.getloadavg()[0],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[10, 1000, 10000])
    for count in parser.parse_args().jobs:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure(Path(name), count)), flush=True)


if __name__ == "__main__":
    main()
