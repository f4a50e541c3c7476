"""Services on the hosts of a network, started as docs/running.md says, and what a person at one of the hosts sees."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from benchmarks.chaos.invariants import ALWAYS, ENDED, QUIET, Terms, violations
from benchmarks.chaos.observation import Observation, Observer
from millrace.client import Client
from millrace.errors import MillraceError
from millrace.ids import JobId
from millrace.rest import JobState
from tests.forked import Forked
from tests.hosts.network import Host, Network

Seen = TypeVar("Seen")
Process = Forked | subprocess.Popen[bytes]
REST, GRPC, RENDEZVOUS = 7700, 7600, 29500
ROOT = Path(__file__).parents[2]
HEAD = "head"
"""The host of the coordinator and of its Redis."""


class Services:
    """The services of one network. All are ended with this object."""

    def __init__(self, network: Network, folder: Path, *, forked: bool, head: str = HEAD) -> None:
        """`forked`: without the seconds in which each process imports torch; see tests/forked.py. `head`: the host of
        the coordinator."""
        self.network, self._head = network, head
        self.state = folder / "coordinator"
        self._logs = folder / "logs"
        self._forked = forked
        self._token = secrets.token_hex(16)
        self._started: list[Process] = []
        self._desk = ThreadPoolExecutor(1, initializer=network[head].enter)
        self.client = Client(f"http://{network[head].address}:{REST}", self._token)
        """To be used `at_the_desk`."""

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._desk.submit(self.client.close).result()
        self._desk.shutdown()
        for process in reversed(self._started):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for host in self.network.hosts.values():
            for one in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
        for process in self._started:
            process.wait(10)

    def start(self, host: str, log: str, module: str, *arguments: str, **environment: str) -> Process:
        """`python -m module arguments...` on a host."""
        where = self.network[host]
        given = {**_QUIET, "MILLRACE_TOKEN": self._token, "MILLRACE_HOST": where.address, **environment}
        file = self._logs / f"{log}.log"
        process = self._fork(where, module, arguments, given, file)
        self._started.append(process)
        return process

    def _fork(self, host: Host, module: str, arguments: Sequence[str], given: Mapping[str, str], log: Path) -> Process:
        whole = {**os.environ, **given}
        if self._forked:
            return Forked("tests.hosts.inside", (host.namespace, host.name, module, *arguments), whole, log)
        command = host.command([sys.executable, "-m", module, *arguments])
        with log.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=whole, cwd=ROOT, start_new_session=True)

    def coordinator(self) -> Process:
        """Waits until it serves."""
        where = ("--http-host", "0.0.0.0", "--grpc-host", "0.0.0.0", "--state-dir", str(self.state))
        process = self.start(self._head, "coordinator", "services.coordinator", *where)
        self.until("the coordinator serves", lambda client: client.fleet() is not None, 120.0)
        return process

    def torchrun(self, hosts: Sequence[str], **environment: str) -> list[Process]:
        """A trainer with a rank on each host."""
        first = self.network[hosts[0]].address
        launch = ["--nnodes", str(len(hosts)), "--nproc-per-node", "1", "--max-restarts", "20"]
        launch += ["--master-addr", first, "--master-port", str(RENDEZVOUS)]
        trainer = ["-m", "services.trainer", "--coordinator", self._grpc]
        return [
            self.start(
                host,
                f"trainer-{host}",
                "torch.distributed.run",
                *launch,
                "--node-rank",
                f"{n}",
                *trainer,
                **environment,
            )
            for n, host in enumerate(hosts)
        ]

    def ranks(self, hosts: Sequence[str], **environment: str) -> list[Process]:
        """The same without torchrun: nobody starts a rank again."""
        together = {"WORLD_SIZE": str(len(hosts)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", **environment}
        together |= {"MASTER_ADDR": self.network[hosts[0]].address, "MASTER_PORT": str(RENDEZVOUS)}
        given = ("services.trainer", "--coordinator", self._grpc)
        return [self.start(host, f"rank-{n}", *given, RANK=str(n), **together) for n, host in enumerate(hosts)]

    def replica(self, host: str, engine: str, *arguments: str, **environment: str) -> Process:
        given = ("--coordinator", self._grpc, "--engine", engine, *arguments)
        return self.start(host, f"replica-{host}", "services.rollout", *given, **environment)

    def node(self, hosts: Sequence[str], number: int) -> Process:
        """One host of a replica of vLLM that lies on all of `hosts`."""
        where = ("--nodes", str(len(hosts)), "--node-rank", str(number), "--leader", self.network[hosts[0]].address)
        given = ("--coordinator", self._grpc, "--engine", "vllm", *where)
        log = f"replica-{hosts[number]}"
        return self.start(hosts[number], log, "services.rollout.launch", *given, VLLM_CPU_KVCACHE_SPACE="1")

    @property
    def _grpc(self) -> str:
        return f"{self.network[self._head].address}:{GRPC}"

    def at_the_desk(self, look: Callable[[Client], Seen]) -> Seen:
        """What `look` gives on the coordinator's host."""
        return self._desk.submit(look, self.client).result()

    def until(self, what: str, look: Callable[[Client], Seen], timeout_s: float) -> Seen:
        """Waits until `look` gives something at the desk; fails with `what` and the ends of the logs."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(MillraceError):
                if seen := self.at_the_desk(look):
                    return seen
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{self.told()}"
            time.sleep(0.1)

    def stop(self, job_id: JobId, terms: Terms) -> tuple[Observation, list[str]]:
        """Pauses the job, looks at everything, cancels it, and looks again: what Redis holds in the end, and what
        contradicted a line of "What always holds"."""
        with contextlib.closing(Observer(self.state)) as observer:
            self.at_the_desk(lambda client: client.pause(job_id))
            paused = self._seen(observer, job_id, JobState.PAUSED)
            self.at_the_desk(lambda client: client.cancel(job_id))
            ended = self._seen(observer, job_id, JobState.CANCELLED)
        found = violations(paused, terms, {**ALWAYS, **QUIET}) + violations(ended, terms, {**ALWAYS, **ENDED})
        return ended, found

    def _seen(self, observer: Observer, job_id: JobId, state: JobState) -> Observation:
        self.until(f"the job is {state}", lambda client: client.job(job_id).state is state, 120.0)
        seen = observer.observe(job_id)
        assert seen is not None
        return seen

    def told(self) -> str:
        """The last lines of each log."""
        ends = {log.name: log.read_text(errors="replace")[-1500:] for log in sorted(self._logs.glob("*.log"))}
        return "\n".join(f"--- {name}\n{end}" for name, end in ends.items())


_QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "MILLRACE_LOG": "json",
    "MILLRACE_PLAINTEXT": "1",
    "PYTHONPATH": str(ROOT),
    "RES_OPTIONS": "timeout:1 attempts:1",
}
