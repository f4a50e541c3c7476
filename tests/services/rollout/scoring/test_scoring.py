"""The scoring pool against reward functions that misbehave in every way that was thought of. Real processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.errors import InvalidJob, Unavailable
from millrace.rewards.outcome import NOT_FINITE
from services.rollout.scoring.isolation import leave_network
from services.rollout.scoring.pool import Scored, ScoringPool

pytestmark = pytest.mark.slow

# One function that does as the answer says.
OBEDIENT = """
import ctypes, math, os, subprocess, sys, time
calls = 0
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    global calls
    calls += 1
    command, _, rest = solution_str.partition(" ")
    if command == "score": return float(rest) * scale
    if command == "echo": return {"score": 1, "got": [data_source, ground_truth, extra_info]}
    if command == "pid": return {"score": 1, "pid": os.getpid(), "calls": calls}
    if command == "raise": raise ValueError(rest)
    if command == "quit": sys.exit(7)
    if command == "vanish": os._exit(7)
    if command == "crash": os.abort()
    if command == "nan": return math.nan
    if command == "none": return None
    if command == "sleep": time.sleep(float(rest))
    if command == "spin":
        while True: pass
    if command == "hold": ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter's lock
    if command == "eat": return len(bytearray(1 << 30))
    if command == "child":
        child = subprocess.Popen(["sleep", "1000"])
        with open(rest, "w") as file: file.write(str(child.pid))
        time.sleep(1000)
    if command == "print":
        print('{"id": 1, "score": 99}', flush=True)
        os.write(1, b"straight to the descriptor\\n")
        subprocess.run(["echo", "from a child"])
        return 0.5
    if command == "read":
        return len(sys.stdin.read())
    if command == "write":
        for fd in range(3, 20):
            try: os.write(fd, b"nonsense\\n")
            except OSError: pass
        return 1
    if command == "big": return {"score": 1, "long": "x" * 100_000}
    if command == "env": return {"score": 1, "secret": os.environ.get("MILLRACE_TOKEN"), "path": "PATH" in os.environ}
    if command == "connect":
        import socket
        socket.create_connection(("127.0.0.1", int(rest)), timeout=2).close()
        return 1
    return 0.0
"""


@pytest.fixture
def obedient(tmp_path: Path) -> str:
    path = tmp_path / "obedient.py"
    path.write_text(OBEDIENT)
    return f"{path}:compute_score"


@asynccontextmanager
async def running(function: str, **settings: Any) -> AsyncIterator[ScoringPool]:
    pool = ScoringPool(function, **{"workers": 1, "timeout_s": 20.0, "start_timeout_s": 60.0, **settings})
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def scoring(function: str, act: Callable[[ScoringPool], Awaitable[Any]], **settings: Any) -> Any:
    async def whole() -> Any:
        async with running(function, **settings) as pool:
            return await act(pool)

    return asyncio.run(whole())


def one_group(function: str, answers: list[str], **settings: Any) -> list[Scored]:
    return scoring(function, lambda pool: pool.score_group("data", answers, "truth", {"index": 3}), **settings)


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_answers_are_scored_in_their_order(obedient: str) -> None:
    scored = one_group(obedient, [f"score {n}" for n in range(20)], workers=3, options={"scale": 0.5})
    assert [s.score for s in scored] == [n / 2 for n in range(20)]
    assert all(s.failure is None and 0 <= s.seconds < 10 for s in scored)


def test_the_function_gets_what_the_row_holds(obedient: str) -> None:
    (scored,) = one_group(obedient, ["echo"])
    assert scored.details == {"got": ["data", "truth", {"index": 3}]}


def test_built_in_rewards_are_served(obedient: str) -> None:
    async def act(pool: ScoringPool) -> list[Scored]:
        return await pool.score_group("d", ["so \\boxed{1/2}", "$9^{9^{9^{9}}}$", "7"], "0.5", {})

    right, endless, wrong = scoring("math", act, timeout_s=3.0)
    assert (right.score, right.failure) == (1.0, None)
    assert (wrong.score, wrong.failure) == (0.0, None)
    assert endless.failure in ("timeout after 3 s", "killed: memory limit 2048 MB")


FAILURES = [
    ("raise no digits", "raised ValueError: no digits (obedient.py, line 11)"),
    ("quit", "raised SystemExit: 7 (obedient.py, line 12)"),
    ("nan", f"returned nan, {NOT_FINITE}"),
    ("score 1e39", f"returned 1e+39, {NOT_FINITE}"),
    ("none", "returned None, not a number"),
    ("score x", "raised ValueError: could not convert string to float: 'x' (obedient.py, line 8)"),
]


def test_a_failure_costs_its_own_answer_and_not_the_process(obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[list[Scored], int]:
        return await pool.score_group("d", ["pid", *(a for a, _ in FAILURES), "pid"], "t", {}), pool.restarts

    (first, *failed, last), restarts = scoring(obedient, act)
    assert [(s.score, s.failure) for s in failed] == [(None, failure) for _, failure in FAILURES]
    assert first.details["pid"] == last.details["pid"]
    assert last.details["calls"] == len(FAILURES) + 2
    assert restarts == 0


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ("vanish", "exited with status 7"),
        ("crash", "killed: SIGABRT, under a memory limit of 400 MB"),
        ("eat", "killed: memory limit 400 MB"),
        ("write", "broke the protocol"),
        ("spin", "timeout after 1 s"),
        ("hold", "timeout after 1 s"),
        ("sleep 60", "timeout after 1 s"),
    ],
)
def test_a_process_that_is_lost_costs_its_own_answer(answer: str, failure: str, obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[list[Scored], int]:
        return await pool.score_group("d", ["score 1", answer, "score 2", "pid"], "t", {}), pool.restarts

    (before, lost, after, last), restarts = scoring(obedient, act, timeout_s=1.0, memory_mb=400)
    assert lost.score is None and lost.failure is not None and lost.failure.startswith(failure)
    assert (before.score, after.score, restarts) == (1.0, 2.0, 1)
    assert last.details["calls"] == 2, "the process that came after kept on"


def test_a_hanging_group_costs_no_other(obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[list[Scored], list[Scored]]:
        bad = asyncio.create_task(pool.score_group("d", ["sleep 60", "score 1"], "t", {}))
        await asyncio.sleep(0.1)
        good = await pool.score_group("d", ["score 3"] * 50, "t", {})
        assert not bad.done()
        return await bad, good

    bad, good = scoring(obedient, act, workers=2, timeout_s=2.0)
    assert [s.failure for s in bad] == ["timeout after 2 s", None]
    assert {(s.score, s.failure) for s in good} == {(3.0, None)}


def test_what_the_function_prints_and_reads_is_not_the_protocol(obedient: str, capfd: pytest.CaptureFixture) -> None:
    printed, read, scored = one_group(obedient, ["print", "read", "score 4"])
    assert [printed.score, read.score, scored.score] == [0.5, 0.0, 4.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert "straight to the descriptor" in err and "from a child" in err


def test_large_answers_travel_and_large_details_stay(obedient: str) -> None:
    long, big = one_group(obedient, ["score 1" + " " * 3_000_000, "big"])
    assert long.score == 1.0
    assert big.score == 1.0 and "100012 characters" in big.details["left_out"]


def test_secrets_of_the_system_do_not_reach_the_function(obedient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", "hush")
    (scored,) = one_group(obedient, ["env"])
    assert scored.details == {"secret": None, "path": True}


def test_a_cancelled_call_leaves_a_pool_that_works(obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[list[Scored], int]:
        call = asyncio.create_task(pool.score_group("d", ["sleep 60", "sleep 60"], "t", {}))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await pool.score_group("d", ["score 5"], "t", {}), pool.restarts

    assert scoring(obedient, act) == ([Scored(5.0, {}, pytest.approx(0, abs=1))], 1)


def test_async_functions_are_scored(tmp_path: Path) -> None:
    path = tmp_path / "later.py"
    path.write_text(
        "import asyncio\nasync def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    await asyncio.sleep(0.01)\n    return {'score': len(solution_str)}\n"
    )
    assert [s.score for s in one_group(f"{path}:score", ["a", "bb"])] == [1.0, 2.0]


# --- network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [False, True])
def test_the_network_is_there_only_if_asked_for(network: bool, obedient: str) -> None:
    if not network and (reason := in_child(leave_network)) != "None":
        pytest.skip(f"this kernel lets no process leave the network: {reason}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        (scored,) = one_group(obedient, [f"connect {server.getsockname()[1]}"], network=network)
    if network:
        assert scored.score == 1.0
    else:
        assert scored.failure is not None and scored.failure.startswith("raised OSError: [Errno 101]")


def in_child(function: Callable[[], object]) -> str:
    code = f"from {function.__module__} import {function.__name__} as f; print(f())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_an_ordinary_user_leaves_the_network_too(tmp_path: Path) -> None:
    code = (
        "import os\nfrom services.rollout.scoring.isolation import leave_network\n"
        "os.setgroups([]); os.setgid(65533); os.setuid(65533)\n"
        "import ctypes; ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # what running a program anew would do\n"
        "reason = leave_network()\n"
        "assert os.getuid() == 65533, os.getuid()\n"
        "print(reason, sorted(os.listdir('/sys/class/net')) if reason else open('/proc/net/dev').read().count(':'))\n"
    )
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    reason, interfaces = done.stdout.rsplit(maxsplit=1)
    # Where user namespaces are closed to everybody, the caller hears why.
    assert (reason, interfaces) == ("None", "1") or "not permitted" in reason or "No space" in reason


def test_where_the_kernel_allows_no_namespace_the_pool_warns_once_and_goes_on(obedient: str) -> None:
    code = (
        "import asyncio\nfrom services.rollout.scoring.pool import ScoringPool\n"
        "async def main():\n"
        f"    pool = ScoringPool({obedient!r}, workers=2)\n"
        "    await pool.start()\n"
        "    group = await pool.score_group('d', ['vanish', 'score 3', 'score 4'], 't', {})\n"
        "    print([s.score for s in group], pool.restarts)\n"
        "    await pool.close()\n"
        "asyncio.run(main())\n"
    )
    # In a user namespace of its own the limit is that namespace's alone.
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare failed" in done.stderr or "max_net_namespaces" in done.stderr:
        pytest.skip(f"no user namespace to try it in: {done.stderr}")
    assert "[None, 3.0, 4.0] 1" in done.stdout, done.stderr
    assert (done.stdout + done.stderr).count("reward functions can reach the network") == 1


# --- starting and ending -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("import no_such_thing\n", InvalidJob, "No module named 'no_such_thing'"),
        ("raise RuntimeError('not today')\n", InvalidJob, "raised RuntimeError: not today"),
        ("def compute_score(answer): pass\n", InvalidJob, "does not take data_source"),
        ("import time; time.sleep(60)\n", InvalidJob, "was not loaded within 1 s"),
        ("import os; os._exit(5)\n", Unavailable, "in 3 attempts: it exited with status 5"),
        ("x = bytearray(1 << 30)\n", InvalidJob, "raised MemoryError"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_told(source: str, error: type, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    start = time.monotonic()
    before = {process.pid for process in psutil.Process().children()}
    with pytest.raises(error, match=message) as told:
        timeout_s = 1.0 if "within 1 s" in message else 15.0
        one_group(f"{path}:compute_score", ["x"], workers=2, start_timeout_s=timeout_s, memory_mb=400)
    assert told.value.what.startswith("reward.function") and told.value.fix
    assert time.monotonic() - start < 20
    left = [p for p in psutil.Process().children() if p.pid not in before]
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


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


def test_a_process_that_dies_idle_costs_nothing(obedient: str) -> None:
    async def act(pool: ScoringPool) -> list[Scored]:
        ((first,), *_) = [await pool.score_group("d", ["pid"], "t", {})]
        os.kill(first.details["pid"], signal.SIGKILL)
        await asyncio.sleep(0.2)
        return await pool.score_group("d", ["score 1"], "t", {})

    assert [s.score for s in scoring(obedient, act)] == [1.0]


def test_a_pool_that_is_not_open_says_so(obedient: str) -> None:
    async def whole() -> None:
        pool = ScoringPool(obedient, workers=1)
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


def test_closing_leaves_no_process(obedient: str, tmp_path: Path) -> None:
    child_file = tmp_path / "child"

    async def act(pool: ScoringPool) -> int:
        ((scored,),) = [await pool.score_group("d", ["pid"], "t", {})]
        asyncio.create_task(pool.score_group("d", [f"child {child_file}"], "t", {}))  # noqa: RUF006 ends with the pool
        while not child_file.exists() or not child_file.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return scored.details["pid"]

    worker = scoring(obedient, act)
    assert gone(worker) and gone(int(child_file.read_text()))


@pytest.mark.parametrize("answer", ["child", "hold"])
def test_processes_do_not_outlive_a_parent_that_is_killed(answer: str, obedient: str, tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    code = (
        "import asyncio, sys\nfrom services.rollout.scoring.pool import ScoringPool\n"
        "async def main():\n"
        f"    pool = ScoringPool({obedient!r}, workers=1)\n"
        "    await pool.start()\n"
        "    print((await pool.score_group('d', ['pid'], 't', {}))[0].details['pid'], flush=True)\n"
        f"    await pool.score_group('d', ['{answer} {child_file}'], 't', {{}})\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    victims = [worker]
    if answer == "child":
        while not child_file.exists() or not child_file.read_text():
            time.sleep(0.02)
        victims.append(int(child_file.read_text()))
    else:
        time.sleep(0.3)
    assert all(psutil.pid_exists(pid) for pid in victims)
    parent.kill()
    parent.wait(10)
    assert all(gone(pid) for pid in victims)


def test_cheap_rewards_start_fast() -> None:
    async def whole() -> float:
        start = time.perf_counter()
        async with running("exact", workers=2):
            return time.perf_counter() - start

    assert min(asyncio.run(whole()) for _ in range(3)) < 1.0


def test_children_of_a_process_that_crashed_are_killed(tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(
        "import os, subprocess\ndef score(data_source, solution_str, ground_truth, extra_info):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    open(solution_str, 'w').write(str(child.pid))\n    os._exit(3)\n"
    )
    (scored,) = one_group(f"{path}:score", [str(tmp_path / "child")])
    assert scored.failure == "exited with status 3"
    assert gone(int((tmp_path / "child").read_text()))


def test_no_descriptor_is_left_open(obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[int, int]:
        async def count(answer: str) -> int:
            for _ in range(5):
                await pool.score_group("d", [answer, "score 1"], "t", {})
            return len(os.listdir("/proc/self/fd"))

        return await count("score 1"), await count("vanish")

    before, after = scoring(obedient, act)
    assert after <= before + 1


@pytest.mark.parametrize("leaves", ["", "os.setsid()"])
@pytest.mark.parametrize("ends", ["os._exit(3)", "os.kill(os.getpid(), 11)", "time.sleep(1000)"])
def test_a_child_that_holds_the_pipes_does_not_hold_up_the_pool(leaves: str, ends: str, tmp_path: Path) -> None:
    path, child = tmp_path / "forks.py", tmp_path / "child"
    path.write_text(
        "import os, time\ndef score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str != 'fork': return 1\n"
        "    if os.fork() == 0:\n"
        f"        {leaves or 'pass'}\n"
        f"        open({str(child)!r}, 'w').write(str(os.getpid()))\n"
        "        time.sleep(1000)\n"
        f"    while not os.path.exists({str(child)!r}) or not open({str(child)!r}).read(): time.sleep(0.01)\n"
        f"    {ends}\n"
    )

    async def act(pool: ScoringPool) -> list[Scored]:
        async with asyncio.timeout(15):
            scored = await pool.score_group("d", ["fork", "score"], "t", {})
            await pool.close()
            return scored

    lost, after = scoring(f"{path}:score", act, timeout_s=3.0)
    assert lost.failure is not None and lost.failure.startswith(("exited with status 3", "killed: SIGSEGV", "timeout"))
    assert after.score == 1.0
    assert gone(int(child.read_text()))


def test_an_end_waits_for_the_group_of_a_leader_that_is_dead(tmp_path: Path) -> None:
    path, child = tmp_path / "forks.py", tmp_path / "child"
    path.write_text(
        "import os, time\ndef score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if os.fork() == 0:\n"
        f"        open({str(child)!r}, 'w').write(str(os.getpid()))\n"
        "        time.sleep(1000)\n"
        f"    while not os.path.exists({str(child)!r}) or not open({str(child)!r}).read(): time.sleep(0.01)\n"
        "    return os.getpid()\n"
    )

    async def act(pool: ScoringPool) -> None:
        ((scored,),) = [await pool.score_group("d", ["fork"], "t", {})]
        assert scored.score is not None
        os.kill(int(scored.score), signal.SIGKILL)
        async with asyncio.timeout(10):
            await pool.close()
        assert gone(int(child.read_text()), within_s=0.5)

    scoring(f"{path}:score", act)
