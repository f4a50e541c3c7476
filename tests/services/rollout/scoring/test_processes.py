"""How the processes of a pool start and end, and what they can reach."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from millrace.errors import InvalidJob, Unavailable
from millrace.rewards import Term
from millrace.sandbox.boundaries import Boundary
from services.rollout.scoring.pool import ScoringPool
from services.rollout.scoring.scored import Scored
from tests.services.rollout.scoring.pools import gone, one_group, processes, reached, running, scoring

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("network", [False, True])
def test_the_network_is_there_only_if_asked_for(network: bool, obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[Scored, bool]:
        (scored,) = await pool.score_group("d", [f"connect {server.getsockname()[1]}"], "t", {})
        return scored, Boundary.NETWORK in {each.boundary for each in pool.missing}

    with socket.create_server(("127.0.0.1", 0)) as server:
        scored, missing = scoring(obedient, act, network=network)
    if network:
        assert scored.score == 1.0
    elif missing:
        pytest.skip("this machine lets no process leave the network")
    else:
        assert scored.failure is not None and scored.failure.startswith("raised OSError: [Errno 101]")


ONE_GROUP = """
import asyncio
from millrace.errors import InvalidJob
from millrace.rewards import Term
from services.rollout.scoring.pool import ScoringPool

async def main():
    pool = ScoringPool([Term(FUNCTION)], workers=2, required=REQUIRED)
    try:
        await pool.start()
    except InvalidJob as refusal:
        return print(refusal)
    group = await pool.score_group('d', ['vanish', 'score 3', 'score 4'], 't', {})
    print([s.score for s in group], pool.restarts, [str(each.boundary) for each in pool.missing])
    await pool.close()

asyncio.run(main())
"""


def without_networks(code: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code where the kernel gives no network namespaces."""
    # In a user namespace of its own the limit is that namespace's alone.
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare failed" in done.stderr or "max_net_namespaces" in done.stderr:
        pytest.skip(f"no user namespace to try it in: {done.stderr}")
    return done


@pytest.mark.parametrize("required", [False, True])
def test_what_the_kernel_does_not_give_is_told_once_or_refused(required: bool, obedient: str) -> None:
    done = without_networks(ONE_GROUP.replace("FUNCTION", repr(obedient)).replace("REQUIRED", repr(required)))
    if required:
        assert "reward.isolation" in done.stdout and "network (unshare: No space left on device)" in done.stdout
        return
    assert "[None, 3.0, 4.0] 1" in done.stdout and "network" in done.stdout, done.stderr
    assert (done.stdout + done.stderr).count("reward functions are not fully contained") == 1


VALIDATED = """
from millrace.data.row import PromptRow
from millrace.rewards import Term
from millrace.spec import parse
from millrace.admission.trials import RewardTrial

reward = {"function": FUNCTION, "isolation": "required"}
job = {"name": "j", "output": "/o", "model": {"path": "/m"}, "data": {"files": ["/d.jsonl"]}, "reward": reward}
for mistake in RewardTrial(parse(job), [Term(FUNCTION)], "data", [PromptRow(0, "d", "p", ground_truth="t")]).mistakes():
    print(mistake)
"""


def test_validate_calls_no_function_without_the_boundaries_that_the_job_requires(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('called')\n")
    done = without_networks(VALIDATED.replace("FUNCTION", repr(f"{tmp_path}/mine.py:f")))
    assert done.stdout.startswith('reward.isolation: "required": this machine does not give'), done.stderr
    assert "network (unshare: No space left on device)" in done.stdout and "Fix: " in done.stdout
    assert "called" not in done.stdout


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("import no_such_thing\n", InvalidJob, "No module named 'no_such_thing'"),
        ("raise RuntimeError('not today')\n", InvalidJob, "raised RuntimeError: not today"),
        ("def compute_score(answer): pass\n", InvalidJob, "does not take data_source"),
        ("import time; time.sleep(600)\n", InvalidJob, "was not loaded within 1 s"),
        ("import os; os._exit(5)\n", Unavailable, "in 3 attempts: it exited with status 5"),
        ("x = bytearray(1 << 30)\n", InvalidJob, "raised MemoryError"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_told(
    source: str, error: type, message: str, tmp_path: Path, mark: str
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    start = time.monotonic()
    with pytest.raises(error, match=message) as told:
        timeout_s = 1.0 if "within 1 s" in message else 15.0
        one_group(f"{path}:compute_score", ["x"], workers=2, start_timeout_s=timeout_s, memory_mb=400)
    assert told.value.what.startswith("reward.function") and told.value.fix
    assert time.monotonic() - start < 120
    assert not processes(mark)


def test_when_no_process_can_be_started_any_more_everyone_hears(obedient: str) -> None:
    path = Path(obedient.split(":")[0])

    async def act(pool: ScoringPool) -> None:
        path.write_text("import os; os._exit(9)\n")  # noqa: ASYNC240
        results = await asyncio.gather(
            *(pool.score_group("d", [answer], "t", {}) for answer in ("vanish", "vanish", "score 1", "score 2")),
            return_exceptions=True,
        )
        assert [r[0].failure for r in results[:2]] == ["exited with status 7"] * 2
        for waiting in results[2:]:
            assert isinstance(waiting, Unavailable) and "no scoring process is left" in waiting.what
        with pytest.raises(Unavailable, match="no scoring process is left"):
            await pool.score_group("d", ["score 1"], "t", {})

    scoring(obedient, act, workers=2)


def guards_first_and_code(mark: str) -> Sequence[psutil.Process]:
    """The three processes of a pool with one worker, from the outside to the inside."""
    return sorted(processes(mark), key=lambda process: len(process.parents()))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_process_that_dies_idle_costs_nothing(which: int, obedient: str, mark: str) -> None:
    async def act(pool: ScoringPool) -> list[Scored]:
        victim = guards_first_and_code(mark)[which]
        victim.kill()
        assert reached(lambda: not victim.is_running())
        async with asyncio.timeout(60):
            while next(iter(pool._alive)).alive:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return await pool.score_group("d", ["score 1"], "t", {})

    assert [s.score for s in scoring(obedient, act)] == [1.0]


def test_a_pool_that_is_not_open_says_so(obedient: str) -> None:
    async def whole() -> None:
        pool = ScoringPool([Term(obedient)], workers=1)
        with pytest.raises(Unavailable, match="not started"):
            await pool.score_group("d", ["score 1"], "t", {})
        await pool.start()
        waiting = [asyncio.create_task(pool.score_group("d", ["sleep 60"], "t", {})) for _ in range(2)]
        await asyncio.sleep(0.2)
        await pool.close()
        done = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        assert any(isinstance(d, Unavailable) for d in done)
        with pytest.raises(Unavailable, match="closed"):
            await pool.score_group("d", ["score 1"], "t", {})
        await pool.close()

    asyncio.run(whole())


def test_closing_leaves_no_process(obedient: str, mark: str) -> None:
    async def act(pool: ScoringPool) -> None:
        asyncio.create_task(pool.score_group("d", ["child"], "t", {}))  # noqa: RUF006 ends with the pool
        async with asyncio.timeout(60):
            while len(processes(mark)) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    scoring(obedient, act)
    assert not processes(mark)


@pytest.mark.parametrize("answer", ["child", "hold"])
def test_processes_do_not_outlive_a_parent_that_is_killed(answer: str, obedient: str, mark: str) -> None:
    code = (
        "import asyncio\nfrom millrace.rewards import Term\nfrom services.rollout.scoring.pool import ScoringPool\n"
        "async def main():\n"
        f"    pool = ScoringPool([Term({obedient!r})], workers=1)\n"
        "    await pool.start()\n"
        "    print('started', flush=True)\n"
        f"    await pool.score_group('d', ['{answer}'], 't', {{}})\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "started\n"
    of_the_pool = 4 if answer == "child" else 3
    assert reached(lambda: len(processes(mark)) == 1 + of_the_pool)
    parent.kill()
    parent.wait(60)
    assert gone(mark)


def test_cheap_rewards_start_fast() -> None:
    async def whole() -> float:
        start = time.perf_counter()
        async with running("exact", workers=2):
            return time.perf_counter() - start

    assert min(asyncio.run(whole()) for _ in range(3)) < 1.0


def test_children_of_a_process_that_crashed_are_killed(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(
        "import os, subprocess\ndef score(data_source, solution_str, ground_truth, extra_info):\n"
        "    subprocess.Popen(['sleep', '1000'])\n    os._exit(3)\n"
    )

    async def act(pool: ScoringPool) -> Scored:
        (scored,) = await pool.score_group("d", ["x"], "t", {})
        assert reached(lambda: not any("sleep" in process.name() for process in processes(mark)))
        return scored

    assert scoring(f"{path}:score", act).failure == "exited with status 3"


def test_no_descriptor_is_left_open(obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[int, int]:
        async def count(answer: str) -> int:
            for _ in range(5):
                await pool.score_group("d", [answer, "score 1"], "t", {})
            return len(os.listdir("/proc/self/fd"))

        return await count("score 1"), await count("vanish")

    before, after = scoring(obedient, act)
    assert after <= before + 1


FORKS = """
import os, time
def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str != 'fork': return 1
    ready, told = os.pipe()
    if os.fork() == 0:
        LEAVES
        os.write(told, b'x')
        time.sleep(1000)
    os.read(ready, 1)
    ENDS
"""


@pytest.mark.parametrize("leaves", ["pass", "os.setsid()"])
@pytest.mark.parametrize("ends", ["os._exit(3)", "os.kill(os.getpid(), 11)", "time.sleep(1000)"])
def test_a_child_that_holds_the_pipes_does_not_hold_up_the_pool(
    leaves: str, ends: str, tmp_path: Path, mark: str
) -> None:
    path = tmp_path / "forks.py"
    path.write_text(FORKS.replace("LEAVES", leaves).replace("ENDS", ends))

    async def act(pool: ScoringPool) -> list[Scored]:
        async with asyncio.timeout(60):
            scored = await pool.score_group("d", ["fork", "score"], "t", {})
            await pool.close()
            return scored

    lost, after = scoring(f"{path}:score", act, timeout_s=3.0)
    assert lost.failure is not None and lost.failure.startswith(("exited with status 3", "killed: SIGSEGV", "timeout"))
    assert after.score == 1.0
    assert not processes(mark)


def test_an_end_waits_for_what_a_dead_process_has_started(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "forks.py"
    path.write_text(FORKS.replace("LEAVES", "pass").replace("ENDS", "return 1"))

    async def act(pool: ScoringPool) -> None:
        ((scored,),) = [await pool.score_group("d", ["fork"], "t", {})]
        assert scored.score == 1.0
        os.kill(guards_first_and_code(mark)[2].pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await pool.close()
        assert not processes(mark)

    scoring(f"{path}:score", act)
