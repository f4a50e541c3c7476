"""The processes of a running stack, found by what they are."""

import contextlib
from collections.abc import Callable

import psutil

from benchmarks.chaos.faults import Target
from millrace.local.stack import Stack

ENGINE_PROCESSES = ("EngineCore", "Worker")
"""How vLLM names its processes."""
SCORER = "services.rollout.scoring"


def find(stack: Stack, target: Target) -> list[psutil.Process]:
    """The processes of this kind that run now, in an order that lasts as long as they do."""
    return FINDERS[target](stack)


def _service(stack: Stack, name: str) -> list[psutil.Process]:
    found = [pid for service, pid in sorted(stack.pids().items()) if service.startswith(name)]
    return [process for pid in found for process in _running(pid)]


def _running(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return []


def _below(services: list[psutil.Process], wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for service in services:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in service.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE and wanted(process):
                        found.append(process)
    return sorted(found, key=lambda process: process.pid)


def _command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def _children(parents: list[psutil.Process]) -> list[psutil.Process]:
    above = {process.pid for process in parents}
    return _below(parents, lambda process: process.ppid() in above)


def _forked(stack: Stack, service: str) -> list[psutil.Process]:
    """The processes that are forked from the one that the service's launcher started."""
    return _children(_children(_service(stack, service)))


def _is_engine(process: psutil.Process) -> bool:
    return any(name in _command(process) for name in ENGINE_PROCESSES)


FINDERS: dict[Target, Callable[[Stack], list[psutil.Process]]] = {
    Target.COORDINATOR: lambda stack: _service(stack, "coordinator"),
    Target.REDIS: lambda stack: _below(
        _service(stack, "coordinator"), lambda process: process.name() == "redis-server"
    ),
    Target.LAUNCHER: lambda stack: _service(stack, "trainer"),
    Target.RANK: lambda stack: _forked(stack, "trainer"),
    Target.REPLICA: lambda stack: [p for p in _forked(stack, "rollout-") if not _is_engine(p)],
    Target.ENGINE: lambda stack: _below(_service(stack, "rollout-"), _is_engine),
    Target.SCORER: lambda stack: _below(_service(stack, "rollout-"), lambda process: SCORER in _command(process)),
}


def carrying(variable: str, value: str) -> list[psutil.Process]:
    """Every process of this machine that was started with this environment variable."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(variable) == value:
                found.append(process)
    return found
