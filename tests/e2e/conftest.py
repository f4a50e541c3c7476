"""A local stack with every part real: Redis, coordinator, trainer and vLLM replicas as processes."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.client import Client
from millrace.data.row import PromptRow, write_rows
from millrace.local import child_processes
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from tests.models import save_tiny_model
from tests.ports import held_port

ROWS = 64


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def job(tmp_path: Path, model: Path) -> dict[str, Any]:
    return vowels_job(tmp_path, model)


def vowels_job(folder: Path, model: Path, count: int = ROWS) -> dict[str, Any]:
    """A small job of long answers to `count` prompts, so that there is always something in flight. The reward counts
    vowels."""
    rows = [
        PromptRow(
            index=n,
            data_source="vowels",
            prompt=[{"role": "user", "content": f"say something, take {n}"}],
            ground_truth="aeiou",
            reward_style="rule",
            extra_info={"index": n},
        )
        for n in range(count)
    ]
    write_rows(folder / "train.parquet", rows)
    (folder / "vowels.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(letter in ground_truth for letter in solution_str) / max(1, len(solution_str))\n"
    )
    return {
        "name": "end to end",
        "output": str(folder / "out"),
        "model": {"path": str(model)},
        "data": {"files": [str(folder / "train.parquet")], "max_prompt_tokens": 128},
        "reward": {"function": f"{folder / 'vowels.py'}:compute_score", "workers": 1},
        "rollout": {
            "samples_per_prompt": 4,
            "max_response_tokens": 160,
            "dtype": "float32",
            "lease_s": 20,
            "engine_options": {"max_num_seqs": 16, "vllm": {"max_model_len": 512, "enforce_eager": True}},
        },
        "trainer": {"dtype": "float32", "token_budget": 4096, "optimizer": {"lr": 1e-4}},
        "schedule": {"steps": 6, "prompts_per_step": 8, "max_staleness": 1},
        "tracking": {"samples_per_step": 8},
    }


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """start(replicas=2): a stack that is gone after the test."""
    with contextlib.ExitStack() as running:
        yield lambda **options: running.enter_context(started(tmp_path / "state", **options))


@contextlib.contextmanager
def started(state: Path, **options: Any) -> Iterator[Stack]:
    """No standby of the trainer's launcher: it imports for five seconds of a core, and no test here ends a launcher."""
    options = {"standby": False, **options}
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with held_port() as http, held_port() as grpc:
        asked = StackOptions(str(state), http_port=http, grpc_port=grpc, environment=environment, **options)
        with Stack(asked) as stack:
            yield stack


SHARED = contextlib.ExitStack()
SHARING: list[Stack] = []


@pytest.fixture
def with_transformers(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """A stack with one replica, for the files that need no other engine. It takes job after job."""
    if not SHARING:
        folder = tmp_path_factory.mktemp("stack") / "state"
        SHARING.append(SHARED.enter_context(started(folder, replicas=1, engine="transformers")))
    return SHARING[0]


@pytest.hookimpl(trylast=True)  # after the test's own fixtures
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ends that stack after the last test of this folder: idle services take a twentieth of a core."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        SHARING.clear()
        SHARED.close()


@pytest.fixture
def client(with_transformers: Stack) -> Iterator[Client]:
    """Of that stack. Jobs that the test leaves are cancelled: they would keep the next test's waiting."""
    with with_transformers.client() as client:
        yield client
        for job in client.jobs():
            if job.state not in ("succeeded", "failed", "cancelled"):
                client.cancel(job.id)


@pytest.fixture
def another_replica(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """another_replica(stack, engine, *options) starts a replica of its own beside a stack, as one does on another
    host."""
    with contextlib.ExitStack() as running:

        def start(stack: Stack, engine: str, *options: str) -> subprocess.Popen[bytes]:
            log = running.enter_context((tmp_path / "another.log").open("ab"))
            argv = (sys.executable, "-m", "services.rollout", "--coordinator", stack.coordinator, "--port", "0")
            argv = (*argv, "--host", "127.0.0.1", *options)
            replica = child_processes.start((*argv, "--engine", engine), stack.options.environment, log)
            running.callback(replica.wait, 60)
            running.callback(replica.terminate)
            return replica

        yield start


def until(what: str, holds: Callable[[], Any], timeout_s: float) -> Any:
    """Waits until `holds()` is true and returns what it gave; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.2)
    return value


def finished(client: Client, job_id: str, timeout_s: float = 240.0) -> Any:
    """The job once it ended, which has to be in success; with its last events where it did not."""
    view = client.wait(job_id, timeout_s)
    told = "" if view.state == "succeeded" else "\n".join(e.message for e in client.events(job_id, follow=False))
    assert view.state == "succeeded", f"{view.failure}\n{told[-3000:]}"
    return view


def adds_up(client: Client, view: Any, groups_per_step: int = 8) -> None:
    """The ledger after a job that ended: every step trained its groups, nothing is lost, nothing counted twice."""
    ledger = client.ledger(view.id)
    assert ledger.trained == view.step * groups_per_step == view.steps * groups_per_step
    assert ledger.issued == ledger.queued + ledger.leased + ledger.generated + ledger.trained + ledger.dropped
    assert [row.step for row in client.metrics(view.id) if row.step] == list(range(1, view.steps + 1))
