"""Runs the command of an agent, once for each episode: in a sandbox that reaches its session and nothing else, or as
the replica runs itself."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from millrace.errors import InvalidJob, refused
from millrace.spec.environment import Agent
from millrace.spec.model import Reward
from millrace.wire.reach import past_proxies
from services.rollout.sessions.command_worker import LONGEST_TAIL
from services.rollout.sessions.open_sessions import Endpoint
from services.rollout.sessions.session import AgentFailed, Session
from services.rollout.user_process.pool import START_TIMEOUT_S
from services.rollout.user_process.process import Setup, UserProcess, WorkerDied

FIELD = "rollout.agent.command"


def check_command(agent: Agent) -> None:
    """Raises InvalidJob if there is no such program here."""
    if agent.command and shutil.which(agent.command[0]) is None:
        fix = "give the absolute path of a program that every replica's host has, or its name in their PATH."
        raise refused(FIELD, agent.command[0], "there is no such program", fix)


def code_of(command: Sequence[str]) -> list[str]:
    """The files and folders that the words of a command name, and the virtual environment that a program lies in."""
    program = shutil.which(command[0])
    named = [Path(word) for word in [program or "", *command[1:]] if os.path.isabs(word) and os.path.exists(word)]
    roots = [path.parents[1] for path in named if (path.parent.parent / "pyvenv.cfg").is_file()]
    return [str(path) for path in [*named, *roots]]


LONGEST_ROW = 100_000
"""Bytes of MILLRACE_PROMPT. The kernel takes no longer variable than 128 KiB."""
KEPT_BACK = ("MILLRACE_TOKEN", "MILLRACE_TOKEN_FILE")
"""Variables of the replica that no command sees."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    """Exit status; −n if signal n killed it."""
    tail: str
    """The end of what it printed."""


@dataclass(frozen=True)
class AgentSetup(Setup):
    """The first message to the process of a sandbox for a command."""

    code: Sequence[str]
    """Files and folders that the command needs."""
    channel: int
    """A socket, over which the sandbox hands out the one at which the session is reached there."""
    field: ClassVar[str] = FIELD
    worker: ClassVar[str] = "services.rollout.sessions.command_worker"

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.channel,)

    def message(self) -> dict[str, Any]:
        return {**Setup.message(self), "function": self.function}


def variables(session: Session, url: str, row: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables with the address of a command's session. Raises AgentFailed for a row that no variable
    can hold."""
    prompt, base = json.dumps(row), f"{url}/sessions/{session.id}"
    if len(prompt.encode()) > LONGEST_ROW:
        raise AgentFailed(f"the row has more than {LONGEST_ROW} bytes, which MILLRACE_PROMPT cannot hold")
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": session.key,
        "MILLRACE_SESSION_URL": base,
        "MILLRACE_PROMPT": prompt,
    }


async def run(agent: Agent, reward: Reward, session: Session, endpoint: Endpoint, row: Mapping[str, Any]) -> Ended:
    """Runs the command to its end; a caller that is cancelled kills it. Raises AgentFailed if it cannot be run, or
    was killed for a limit."""
    if not agent.sandbox:
        return await _plain(agent.command, variables(session, endpoint.url, row))
    here, there = socket.socketpair()
    with here, there:
        process = await _sandbox(agent, reward, there.fileno())
        try:
            listener = _listener(here)
            server = await endpoint.serve_also(listener)
            try:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                asked = {"command": list(agent.command), "env": variables(session, url, row)}
                reply = await process.ask(asked, agent.episode_s)
            finally:
                server.close()
        except WorkerDied as death:
            raise AgentFailed(f"the command was {death}") from death
        finally:
            process.kill()
    if (failure := reply.get("failure")) is not None:
        raise AgentFailed(f"the command cannot be run: {failure}")
    return Ended(reply["status"], reply["tail"])


async def _sandbox(agent: Agent, reward: Reward, channel: int) -> UserProcess:
    limits = (reward.memory_mb, reward.network, reward.isolation == "required")
    setup = AgentSetup(agent.command[0], {}, *limits, code_of(agent.command), channel)
    try:
        process = await UserProcess.start(setup, START_TIMEOUT_S)
    except WorkerDied as death:
        raise AgentFailed(f"the sandbox of the command was {death}") from death
    except InvalidJob as error:
        raise AgentFailed(f"the sandbox of the command did not start: {error.what}") from error
    return process


def _listener(channel: socket.socket) -> socket.socket:
    """The listening socket that the sandbox made. It has sent it before it was ready."""
    _, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    return listener


async def _plain(command: Sequence[str], variables: Mapping[str, str]) -> Ended:
    """Runs a command without a sandbox, in a process group that is killed in the end."""
    kept = {name: value for name, value in os.environ.items() if name not in KEPT_BACK}
    env = {**kept, **past_proxies(variables["OPENAI_BASE_URL"], kept), **variables}
    # A file, not a pipe: what the command has started may hold a pipe after its end.
    with tempfile.TemporaryFile() as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=env, stdin=DEVNULL, stdout=output, stderr=STDOUT, start_new_session=True
            )
        except OSError as error:
            raise AgentFailed(f"the command cannot be run: {error.strerror}") from error
        try:
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(max(0, output.seek(0, os.SEEK_END) - LONGEST_TAIL))
        return Ended(status, output.read().decode(errors="replace"))
