"""Hosts on one machine: network namespaces, each with a link to a virtual switch. Links can be cut and throttled.

The switch has a namespace too, so that nothing is changed in the network of the machine. Host names are not resolved:
the services have to reach each other by the addresses that they are told. Needs Linux, root, `ip` and `tc`.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

PREFIX = "millrace-"
NAMESPACES = Path("/run/netns")
DEVICE = "eth0"
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
_NUMBERS = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Host:
    """One host of a network."""

    name: str
    namespace: str
    address: str
    link: str
    """The switch's end of its link."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command, run on this host and under its name. The process that is started becomes the command's."""
        named = 'printf %s "$0" > /proc/sys/kernel/hostname; exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace]
        return [*inside, "unshare", "--uts", "sh", "-c", named, self.name, *argv]

    def enter(self) -> None:
        """Moves the calling thread to this host: sockets that it opens and threads and processes that it starts."""
        with (NAMESPACES / self.namespace).open() as file:
            _checked(_libc.setns(file.fileno(), CLONE_NEWNET))
        _checked(_libc.unshare(CLONE_NEWUTS))
        _checked(_libc.sethostname(self.name.encode(), len(self.name)))

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on this host."""
        found = []
        for pid in _ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return [process for process in found if process.pid != os.getpid()]


class Network:
    """Hosts by name, as long as this object is entered. At the end their processes are killed; what a killed test left
    is removed by the next one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._id = f"{PREFIX}{os.getpid()}-{next(_NUMBERS)}"
        self._switch = f"{self._id}-switch"
        self.hosts = {
            name: Host(name, f"{self._id}-{name}", f"10.77.0.{number}", f"port{number}")
            for number, name in enumerate(names, 1)
        }

    def __enter__(self) -> Self:
        _remove_left()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts.values():
            _ip("netns", "add", host.namespace)
            ends = ("link", "add", host.link, "type", "veth", "peer", "name", DEVICE, "netns", host.namespace)
            _ip("-n", self._switch, *ends)
            _ip("-n", self._switch, "link", "set", host.link, "master", "bridge", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
            _ip("-n", host.namespace, "link", "set", DEVICE, "up")

    def _remove(self) -> None:
        for namespace in [*(host.namespace for host in self.hosts.values()), self._switch]:
            if (NAMESPACES / namespace).exists():
                _end(namespace)

    def cut(self, name: str) -> None:
        """Takes the link of a host down: nothing reaches it, and nothing is told of that."""
        _ip("-n", self._switch, "link", "set", self.hosts[name].link, "down")

    def heal(self, name: str) -> None:
        """Takes the link up again."""
        _ip("-n", self._switch, "link", "set", self.hosts[name].link, "up")

    def throttle(self, name: str, mbit_per_s: float) -> None:
        """Limits what a host sends, and what it receives."""
        host = self.hosts[name]
        limit = ("root", "tbf", "rate", f"{mbit_per_s:g}mbit", "burst", "256kb", "latency", "100ms")
        for namespace, device in ((self._switch, host.link), (host.namespace, DEVICE)):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *limit)

    def release(self, name: str) -> None:
        """Ends the limit."""
        host = self.hosts[name]
        for namespace, device in ((self._switch, host.link), (host.namespace, DEVICE)):
            _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")


@functools.cache
def why_not() -> str:
    """Why this machine cannot make such networks; empty where it can."""
    if missing := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"there is no {missing[0]} command (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with Network(["one"]) as network:
            network.throttle("one", 100)
            _run(*network["one"].command(["true"]))
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd[:4])}: {error.stderr.strip()}"
    return ""


def _remove_left() -> None:
    """Removes the networks of tests that were killed."""
    for path in NAMESPACES.glob(f"{PREFIX}*"):
        if not psutil.pid_exists(int(path.name.removeprefix(PREFIX).split("-")[0])):
            with contextlib.suppress(subprocess.CalledProcessError):  # somebody else removes it
                _end(path.name)


def _end(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            if int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", namespace)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=10).stdout


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
