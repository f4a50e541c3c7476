"""What starts and stops replicas. A scaler is asked for a number of replicas. Slurm, Compose, Kubernetes or the local
supervisor does the rest, and SIGTERM drains a replica that has to go."""

import asyncio
import hashlib
import json
import os
import re
import shlex
import shutil
import ssl
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

import httpx

from millrace.errors import InvalidState, Unavailable
from millrace.local.state_folder import read_state, scale

COMMAND_S = 60.0
"""How long a command of Slurm or Docker may take."""
COMPOSE_S = 900.0
"""`docker compose up` waits until the containers that go have drained."""
API_S = 10.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RESOURCES = {"deployments": "/apis/apps/v1", "leaderworkersets": "/apis/leaderworkerset.x-k8s.io/v1"}
"""What the Kubernetes scaler scales, and its API."""
KUBERNETES_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"


class Scaler(Protocol):
    """Starts and stops the replicas of one pool."""

    async def current(self) -> int:
        """Replicas that were asked for last. Raises Unavailable."""
        ...

    async def set(self, wanted: int) -> None:
        """Asks for `wanted` replicas. Idempotent. Raises Unavailable, or InvalidState if that many cannot run."""
        ...


class LocalScaler:
    """The replicas of a local stack, by its supervisor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def current(self) -> int:
        try:
            state = await asyncio.to_thread(read_state, self._folder)
        except (OSError, json.JSONDecodeError) as error:
            what = f"the supervisor's {self._folder}/stack.json cannot be read: {error}."
            raise Unavailable(what, "start the stack with `millrace up`.") from error
        if not state["complete"]:
            return int(state["replicas"])  # it still starts them
        running = [name for name in state["processes"] if name.startswith("rollout-")]
        # One that was drained by hand is to be started again.
        return min(int(state["replicas"]), len(running))

    async def set(self, wanted: int) -> None:
        await asyncio.to_thread(scale, self._folder, wanted)


class NoScaler:
    """Starts nothing. KEDA, or somebody else, reads `millrace_replicas_wanted`."""

    def __init__(self) -> None:
        self._wanted = 0

    async def current(self) -> int:
        return self._wanted

    async def set(self, wanted: int) -> None:
        self._wanted = wanted


class SlurmScaler:
    """Each replica is a job of its own of `sbatch ARGUMENTS`. The jobs are found again by their name. One that has to
    go is signalled by `scancel --signal=USR1`, which drains it; then it gets another name, and counts no more."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = tuple(arguments)
        belongs = (*arguments, os.environ.get("MILLRACE_STACK", ""), os.environ.get("MILLRACE_COORDINATOR", ""))
        self._name = f"millrace-{hashlib.sha256(repr(belongs).encode()).hexdigest()[:10]}"

    async def current(self) -> int:
        return len(await self._jobs())

    async def set(self, wanted: int) -> None:
        jobs = await self._jobs()
        for _ in range(wanted - len(jobs)):
            await _ran(["sbatch", "--parsable", f"--job-name={self._name}", *self._arguments])
        # Those that wait for a node first, then the youngest.
        going = sorted(jobs, key=lambda job: (jobs[job] == "PENDING", job), reverse=True)[: max(0, len(jobs) - wanted)]
        for job in going:
            if jobs[job] == "PENDING":
                await _ran(["scancel", str(job)])
                continue
            await _ran(["scancel", "--signal=USR1", str(job)])
            await _ran(["scontrol", "update", f"JobId={job}", f"JobName={self._name}-drains"])

    async def _jobs(self) -> dict[int, str]:
        """The state of each job of a replica that is to stay."""
        listed = await _ran(["squeue", "--me", "--noheader", f"--name={self._name}", "--format=%A %T"])
        found = [line.split() for line in listed.splitlines()]
        return {int(job): state for job, state in found if state != "COMPLETING"}


class ComposeScaler:
    """The containers of a service, by `docker compose OPTIONS up --scale`, or by `docker-compose` (1.29) if Docker has
    no plugin of Compose."""

    def __init__(self, options: Sequence[str], service: str) -> None:
        self._options, self._service = tuple(options), service
        self._program: tuple[str, ...] = ()

    async def current(self) -> int:
        ids = (await self._compose("ps", "--quiet", self._service)).split()
        if not ids:
            return 0
        # Compose 1.29 lists containers that were stopped by hand too. One that restarts is to stay.
        states = await _ran(["docker", "inspect", "--format={{.State.Status}}", *ids])
        return sum(state in ("running", "restarting") for state in states.split())

    async def set(self, wanted: int) -> None:
        scale = ("--detach", "--no-deps", "--no-recreate", "--scale", f"{self._service}={wanted}", self._service)
        await self._compose("up", *scale, within_s=COMPOSE_S)

    async def _compose(self, *words: str, within_s: float = COMMAND_S) -> str:
        if not self._program:
            try:
                await _ran(["docker", "compose", "version"])
            except Unavailable:
                if shutil.which("docker-compose") is None:
                    raise
                self._program = ("docker-compose",)
            else:
                self._program = ("docker", "compose")
        return await _ran([*self._program, *self._options, *words], within_s)


class KubernetesScaler:
    """The scale of a Deployment or a LeaderWorkerSet, set by the Kubernetes API with the token of the pod's service
    account."""

    def __init__(self, resource: str, name: str, account: Path = SERVICE_ACCOUNT) -> None:
        """Raises InvalidState outside of a pod."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        try:
            namespace = (account / "namespace").read_text().strip()
            self._trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            what = f"--scaler kubernetes: {account} cannot be read: {error.strerror or error}."
            raise InvalidState(what, "run in a pod with the token of a service account.") from error
        if not host or not port:
            what = "--scaler kubernetes: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set."
            raise InvalidState(what, "run in a pod.")
        self._what, self._account = f"{resource}/{name}", account
        address = f"[{host}]" if ":" in host else host
        self._url = f"https://{address}:{port}{RESOURCES[resource]}/namespaces/{namespace}/{resource}/{name}/scale"

    async def current(self) -> int:
        return await self._call("GET")

    async def set(self, wanted: int) -> None:
        await self._call("PATCH", {"spec": {"replicas": wanted}})

    async def _call(self, method: str, patch: object = None) -> int:
        """The replicas that the scale then asks for."""
        token = await asyncio.to_thread((self._account / "token").read_text)  # it is replaced now and then
        headers = {"authorization": f"Bearer {token.strip()}", "content-type": "application/merge-patch+json"}
        try:
            async with httpx.AsyncClient(verify=self._trusted, trust_env=False, timeout=API_S) as client:
                content = None if patch is None else json.dumps(patch)
                answer = await client.request(method, self._url, headers=headers, content=content)
            if answer.is_success:
                return int(answer.json().get("spec", {}).get("replicas", 0))
            reason = str(answer.json().get("message", ""))[:300]
        except httpx.HTTPError as error:
            what = f"the Kubernetes API did not answer {method} {self._url}: {error or type(error).__name__}."
            raise Unavailable(what, "see whether the API server runs.") from error
        except (ValueError, TypeError, AttributeError):
            reason = "its answer is not the document of a scale"
        what = f"the Kubernetes API answered {method} {self._what}/scale with {answer.status_code}: {reason}"
        if answer.status_code == HTTPStatus.NOT_FOUND:
            raise InvalidState(what, "correct the name behind --scaler kubernetes.")
        fix = "let the service account get and patch it: docs/running.md, Adding and removing replicas."
        raise Unavailable(what, fix)


async def _ran(command: Sequence[str], within_s: float = COMMAND_S) -> str:
    """The output of a command. Raises InvalidState if there is no such program, Unavailable if it fails."""
    shown = " ".join(command)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        what = f"--scaler: {command[0]} cannot be run: {error.strerror}."
        raise InvalidState(what, "install it on the coordinator's host, or choose another --scaler.") from error
    try:
        async with asyncio.timeout(within_s):
            output, errors = await process.communicate()
    except TimeoutError as error:
        what = f"`{shown}` did not end within {within_s:g} s."
        raise Unavailable(what, "see whether its service answers.") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        reason = errors.decode(errors="replace").strip()[-500:]
        raise Unavailable(f"`{shown}` failed with status {process.returncode}: {reason}", "run it by hand.")
    return output.decode(errors="replace")


def scaler(kind: str, stack: str) -> Scaler:
    """The scaler that was asked for: `local`, `none`, or a kind with `:` and what it scales. `stack`: state folder of
    the local stack, if this coordinator belongs to one. Raises InvalidState."""
    name, _, rest = kind.partition(":")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise InvalidState(f"--scaler: {kind!r}: {error}.", "close each quotation mark.") from error
    if name == "local" and not words:
        if not stack:
            what = "--scaler local: this coordinator belongs to no local stack."
            raise InvalidState(what, "start it by `millrace up --replicas MIN:MAX`, or choose another --scaler.")
        return LocalScaler(Path(stack))
    if name == "none" and not words:
        return NoScaler()
    if name == "slurm" and words:
        return SlurmScaler(words)
    if name == "compose" and words:
        return ComposeScaler(words[:-1], words[-1])
    resource, _, of = rest.rpartition("/")
    if name == "kubernetes" and (resource or "deployments") in RESOURCES and re.fullmatch(KUBERNETES_NAME, of):
        return KubernetesScaler(resource or "deployments", of)
    fix = "choose one of local, none, slurm:SBATCH_ARGUMENTS, compose:[OPTIONS] SERVICE, kubernetes:[RESOURCE/]NAME"
    raise InvalidState(f"--scaler: {kind!r} is unknown.", f"{fix}, with {' or '.join(RESOURCES)} as RESOURCE.")
