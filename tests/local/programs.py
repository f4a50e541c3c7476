"""Processes that behave badly, to be supervised, and a way to see what is left of them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 2:  # a grandchild that is as stubborn, in a session of its own, as torchrun's ranks are
    subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


def stubborn(mark: str) -> tuple[str, ...]:
    """Ignores SIGTERM, and so does its child."""
    return (sys.executable, "-c", STUBBORN, mark, STUBBORN)


def alive(mark: str) -> list[psutil.Process]:
    """Processes whose command line has `mark` and that are not dead yet."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def eventually(what: Callable[[], object], within_s: float = 60.0) -> None:
    """Fails where `what` does not become true in time."""
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, f"not true within {within_s:g} s"
        time.sleep(0.05)


MEMBER = """
import asyncio, sys
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from millrace.wire.membership import Membership
from millrace.contracts.v1 import fleet_pb2

async def serve(coordinator, name):
    drained = asyncio.Event()
    def registration():
        address = f"127.0.0.1:{9 + int(name[8])}"
        return fleet_pb2.RegisterRequest(member_id=name, kind=fleet_pb2.MEMBER_KIND_ROLLOUT, address=address,
                                         protocol_version=PROTOCOL_VERSION)
    beat = lambda: fleet_pb2.HeartbeatRequest(member_id=name)
    member = Membership(Peer(coordinator), name, registration, beat, drained.set)
    beating = asyncio.create_task(member.run())
    asyncio.get_running_loop().add_signal_handler(15, drained.set)
    await drained.wait()
    beating.cancel()
    await member.drain()
    await member.leave("drained")

asyncio.run(serve(*sys.argv[1:3]))
"""
"""A replica as the fleet sees it, without an engine: python -c MEMBER COORDINATOR ID. It leaves when it is drained."""

SUPERVISING = """
import os, sys
from millrace.errors import InvalidState
from millrace.local import supervisor
from millrace.local.options import Service, StackOptions

state, http_port, grpc_port, mark, stubborn, member = sys.argv[1:]
python = sys.executable
ports = ("--http-port", http_port, "--grpc-port", grpc_port)
coordinator = (python, "-m", "services.coordinator", *ports, "--state-dir", state + "/coordinator")
options = StackOptions(state, http_port=int(http_port), grpc_port=int(grpc_port))
supervisor.SILENT_S = float(os.environ.get("TEST_SILENT_S", supervisor.SILENT_S))

def members(options):
    if options.replicas > 5:
        raise InvalidState("six replicas need six GPUs.", "start fewer.")
    names = [f"rollout-{number}a2b3c4d" for number in range(options.replicas)]
    replicas = [(python, "-c", member, "127.0.0.1:" + grpc_port, name, mark) for name in names]
    return [
        Service("coordinator", coordinator, {}, True, 10.0),
        Service("trainer", (python, "-c", stubborn, mark, stubborn), {}, True, 1.0),
        *(Service(f"rollout-{number}", argv, {}, False, 5.0) for number, argv in enumerate(replicas)),
    ]

raise SystemExit(supervisor.supervise(options, members(options), members))
"""


def supervising(state: Path, http_port: int, grpc_port: int, mark: str) -> tuple[str, ...]:
    """A supervisor of a real coordinator, of a trainer that does not want to stop, and of a member of the fleet."""
    return (sys.executable, "-c", SUPERVISING, str(state), str(http_port), str(grpc_port), mark, STUBBORN, MEMBER)


TAKING_OVER = """
import asyncio, os, signal, sys
from pathlib import Path
from millrace.local import supervisor
from millrace.local.child_processes import adopt_orphans
from millrace.local.options import Service, StackOptions

state = sys.argv[1]
supervisor.STANDBY_AFTER_S = 0.1
program = "import os, time; from millrace.local.launcher import stand_by; stand_by(); print(os.getpid(), flush=True)"
service = Service("trainer", (sys.executable, "-c", program + "; time.sleep(600)"), {}, True, 1.0, standby=True)

async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)

async def main():
    stack = supervisor.Supervisor(StackOptions(state), [service], lambda options: [service])
    log = Path(state, "logs", "trainer.log")
    keeping = asyncio.create_task(stack.keep(service))
    await until(lambda: log.exists() and f"{stack.running['trainer'].pid}\\n" in log.read_text())
    stack.complete = True
    lives = [stack.running["trainer"].pid]
    for how in (signal.SIGKILL, signal.SIGTERM):
        await until(lambda: "trainer" in stack.standbys)
        standby = stack.standbys["trainer"].pid
        os.kill(lives[-1], how)
        await until(lambda: f"{standby}\\n" in log.read_text())
        assert stack.running["trainer"].pid == standby, "the standby has become the service"
        lives.append(standby)
    await until(lambda: "trainer" in stack.standbys)
    lives.append(stack.standbys["trainer"].pid)
    os.kill(lives[-1], signal.SIGKILL)
    os.kill(lives[-2], signal.SIGKILL)
    await until(lambda: "trainer" in stack.running and stack.running["trainer"].pid not in lives)
    await until(lambda: f"{stack.running['trainer'].pid}\\n" in log.read_text())
    stack.stopping.set()
    await keeping
    await stack.stop()
    assert not supervisor.child_processes.descendants()
    assert not {"numpy", "millrace.spec"} & set(sys.modules), "a stack starts without them"

adopt_orphans()
asyncio.run(main())
"""
"""A supervisor whose service has a standby, while both are ended again and again: python -c TAKING_OVER STATE."""
