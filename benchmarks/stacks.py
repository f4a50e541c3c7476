"""What benchmarks with a local stack share: the stack with a client, a job to begin with, and waiting."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from millrace.client import Client
from millrace.demo.run import ENVIRONMENT
from millrace.demo.tasks import TASKS, write_task_data
from millrace.local.options import StackOptions
from millrace.local.ports import free_port
from millrace.local.stack import Stack
from millrace.rest import JobState, JobView
from millrace.spec import JobSpec

Found = TypeVar("Found")
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    return (sum(solution_str.encode()) % 101) / 100
"""


@contextlib.contextmanager
def stack_in(folder: Path, **options: Any) -> Iterator[tuple[Stack, Client]]:
    """A stack with its state in `folder` and at free ports, and a client of it. `options`: other fields of
    `StackOptions`. If the block fails, the end of each log is printed."""
    environment = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    fields = {"http_port": free_port(), "grpc_port": free_port(), "environment": environment, **options}
    with Stack(StackOptions(str(folder), **fields)) as stack, stack.client() as client:
        try:
            yield stack, client
        except BaseException:
            for file in sorted(folder.glob("logs/*.log")):
                print(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}", file=sys.stderr)
            raise


def letters_job(folder: Path, **parts: Any) -> dict[str, Any]:
    """A job that trains the model in `folder`/model on the demo's words, with a reward that means nothing. `parts`:
    other fields of the spec."""
    (folder / "reward.py").write_text(REWARD)
    train, _ = write_task_data(TASKS["reverse"], folder / "data", seed=0)
    return {
        "output": str(folder / "output"),
        "model": {"path": str(folder / "model")},
        "data": {"files": [str(train)], "max_prompt_tokens": 48},
        "reward": {"function": f"{folder / 'reward.py'}:compute_score", "workers": 2},
        **parts,
    }


def finished(client: Client, spec: JobSpec | Mapping[str, Any], limit_s: float) -> JobView:
    """Submits a job and waits for its end. Raises RuntimeError if it did not succeed, Unavailable after `limit_s`."""
    done = client.wait(client.submit(spec).id, limit_s)
    if done.state is not JobState.SUCCEEDED:
        raise RuntimeError(f"the job is {done.state}: {done.failure}")
    return done


def waited(find: Callable[[], Found | None], limit_s: float) -> Found:
    """The first value of `find()` that is true. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while not (found := find()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s")
        time.sleep(0.05)
    return found
