"""A pool of scorers under attack: `python -m tests...hostile_replica USER NAMESPACES ATTACK...`.

This process has secrets in its environment, listens on sockets and keeps state as services do. It becomes USER (a
number; `same`: stays who it is), gives up the rights to make namespaces where NAMESPACES is `no`, and has each attack
scored beside good answers. Prints one line of JSON.
"""

import asyncio
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import millrace
from millrace.rewards import Term
from millrace.sandbox import privileges, syscalls
from services.rollout.scoring.pool import ScoringPool
from tests.services.rollout.scoring import hostile_rewards

MEMORY_MB = 1024
TIMEOUT_S = 25.0


def become(user: int) -> None:
    """Becomes an ordinary user who can still reach this interpreter."""
    closed = [folder for folder in Path(sys.base_prefix).parents if folder.stat().st_mode & 0o001 == 0]
    if closed:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, "/", syscalls.MS_SLAVE | syscalls.MS_REC)
        python = syscalls.copy_of_tree(sys.base_prefix)
        syscalls.mount("tmpfs", str(closed[-1]), 0, "mode=755")
        os.makedirs(sys.base_prefix)
        syscalls.attach(python, sys.base_prefix)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    syscalls.stay_inspectable()


def forbid_namespaces() -> None:
    """As a container without rights: no namespace can be made any more."""
    user = os.getuid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    privileges.become(None)


@contextmanager
def prey(folder: Path) -> Iterator[dict[str, Any]]:
    """What there is to attack, as a reward function is told it."""
    state, marker = folder / "state", str(secrets.randbelow(10**12) + 10**12)
    state.mkdir()
    (state / "token").write_text("mine")
    segment = Path("/dev/shm", marker)
    segment.write_text("mine")
    with ExitStack() as ending:
        ending.callback(segment.unlink)
        for address in (str(state / "redis.socket"), f"\0{marker}"):
            listening = ending.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(address)
            listening.listen()
        tcp = ending.enter_context(socket.create_server(("127.0.0.1", 0)))
        yield {
            "secret": os.environ["MILLRACE_TOKEN"],
            "marker": marker,
            "socket": str(state / "redis.socket"),
            "abstract": marker,
            "port": tcp.getsockname()[1],
            "state": str(state),
            "package": str(Path(millrace.__file__).parent),
            "private": [str(state / "token"), str(state), "/etc/shadow", "/proc/1/root/etc/shadow", __file__],
            "huge": 3 * MEMORY_MB << 20,
        }


async def attacked(code: Path, attacks: list[str], prey: dict[str, Any]) -> dict[str, Any]:
    """Each attack beside a group of good answers, and another such group after it."""
    pool = ScoringPool([Term(f"{code}:compute_score")], workers=2, timeout_s=TIMEOUT_S, memory_mb=MEMORY_MB)
    await pool.start()
    scored: dict[str, Any] = {}
    try:
        for attack in attacks:
            (one,), beside = await asyncio.gather(
                pool.score_group("d", [attack], "t", prey), pool.score_group("d", ["good"] * 20, "t", prey)
            )
            after = await pool.score_group("d", ["good"] * 4, "t", prey)
            lost = [each.failure for each in (*beside, *after) if each.score != 1]
            scored[attack] = {"failure": one.failure, "got": one.details.get("got"), "lost": lost}
    finally:
        async with asyncio.timeout(60):
            await pool.close()
    return {"missing": [asdict(each) for each in pool.missing], "scored": scored}


def main() -> None:
    user, namespaces, *attacks = sys.argv[1:]
    if user != "same":
        become(int(user))
    with tempfile.TemporaryDirectory() as folder, prey(Path(folder)) as told:
        if namespaces == "no":
            forbid_namespaces()
        code = Path(folder) / "reward.py"
        shutil.copyfile(hostile_rewards.__file__, code)
        os.environ["MILLRACE_HIDDEN_PATHS"] = told["state"]
        result = asyncio.run(attacked(code, attacks, told))
        left = [process.pid for process in psutil.process_iter() if told["marker"] in _command(process)]
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        segments = sorted(path.name for path in Path("/dev/shm").glob(f"{told['marker']}*"))
        files = sorted(path.name for path in Path(folder).rglob("*"))
    state = {"user": os.getuid(), "left": left + children, "segments": segments, "files": files}
    print(json.dumps({**result, **state, "marker": told["marker"]}))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


if __name__ == "__main__":
    main()
