"""A real Slurm on one machine: each node is a network namespace with a slurmd, the first one has the slurmctld too.

Needs Debian's packages slurmctld, slurmd, slurm-client and munge, and what tests/hosts/network.py needs.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.hosts import network
from tests.hosts.network import Network

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NAMES_OF = Path("/etc/netns")
"""`ip netns exec` shows the files of NAMESPACE here as those of /etc."""
# A requeued job waits as long as credentials live, 120 seconds by default.
CONFIGURATION = """
ClusterName=millrace
SlurmctldHost={head}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=25
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdTimeout=6
MessageTimeout=5
KillWait=5
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why there is no Slurm on this machine; empty where there is."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"there is no {missing[0]} (Debian: slurmctld slurmd slurm-client munge)"
    return network.why_not()


class Slurm:
    """A cluster with a node for each name, as long as this object is entered."""

    def __init__(self, nodes: Sequence[str], folder: Path) -> None:
        """`folder` has a short path: munge's socket lies in it."""
        self.nodes = tuple(nodes)
        self.network = Network(nodes)
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as entered:
            entered.enter_context(self.network)
            entered.callback(self._end)
            self._configure()
            self._start()
            self._stack = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _configure(self) -> None:
        lines = [f"NodeName={name} NodeAddr={self.network[name].address} CPUs=8 Gres=gpu:2" for name in self.nodes]
        text = CONFIGURATION.format(folder=self.folder, head=self.nodes[0], nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/zero\nName=gpu File=/dev/full\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in ("state", "munge", *self.nodes):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{host.address} {name}\n" for name, host in self.network.hosts.items()
        )
        for host in self.network.hosts.values():
            (NAMES_OF / host.namespace).mkdir(parents=True)
            (NAMES_OF / host.namespace / "hosts").write_text(hosts)

    def _start(self) -> None:
        munge = self.folder / "munge"
        places = ("--key-file", "--socket", "--pid-file", "--log-file", "--seed-file")
        files = [
            f"{option}={munge / name}"
            for option, name in zip(places, ("key", "socket", "pid", "log", "seed"), strict=True)
        ]
        self._daemon([shutil.which("munged", path=PATH) or "", "--foreground", "--force", *files])
        self.until("munge's socket", lambda: (munge / "socket").exists(), 20)
        self._daemon(self.network[self.nodes[0]].command(["slurmctld", "-D"]))
        for name in self.nodes:
            self._daemon(self.network[name].command(["slurmd", "-D", "-N", name]))
        self.until("all nodes are idle", lambda: self._states() == {"idle"}, 20)

    def _states(self) -> set[str]:
        done = self._run(["sinfo", "--noheader", "--Node", "--format=%T"], {})
        return set(done.stdout.split()) if done.returncode == 0 else set()

    def _daemon(self, command: Sequence[str]) -> None:
        log = self.folder / "daemons.log"
        with log.open("ab") as output:
            self._daemons.append(
                subprocess.Popen(command, env=self._environment, stdout=output, stderr=output, start_new_session=True)
            )

    def _end(self) -> None:
        for daemon in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                daemon.send_signal(signal.SIGKILL)
            daemon.wait(20)
        for host in self.network.hosts.values():
            shutil.rmtree(NAMES_OF / host.namespace, ignore_errors=True)

    def run(self, *argv: str, **environment: str) -> str:
        """A command on the first node; its standard output."""
        done = self._run(argv, environment)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr or done.stdout}"
        return done.stdout.strip()

    def _run(self, argv: Sequence[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        command = self.network[self.nodes[0]].command(argv)
        given = {**self._environment, **environment}
        return subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)

    def until(self, what: str, holds: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{self.told()}"
            time.sleep(0.2)

    def lose(self, node: str) -> None:
        """The node dies with all that runs on it."""
        for process in self.network[node].processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def told(self) -> str:
        """The last lines of each log."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in self.folder.glob("*.log")
        )
