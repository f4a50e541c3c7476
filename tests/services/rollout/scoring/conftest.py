"""A reward function that does as it is told, and a mark by which a test finds the processes of its pools."""

import uuid
from pathlib import Path

import pytest

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
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if command == "print":
        print('{"id": 1, "score": 99}', flush=True)
        os.write(1, b"straight to the descriptor\\n")
        subprocess.run(["echo", "from a child"], check=True)
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


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Every process of the test's pools has it in its environment, which is seen from outside the sandbox only."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("TEST_POOL", value)
    monkeypatch.setenv("MILLRACE_REWARD_ENVIRONMENT", "TEST_POOL")
    return value
