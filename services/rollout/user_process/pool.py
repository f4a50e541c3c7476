"""A pool of processes that have a user's code loaded. A process that hangs, crashes or needs too much memory is killed
and replaced."""

import asyncio
from typing import ClassVar

import structlog

from millrace.errors import InvalidJob, Unavailable
from millrace.sandbox.boundaries import Missing
from services.rollout.user_process.process import Setup, UserProcess, WorkerDied

log = structlog.get_logger(__name__)
START_ATTEMPTS = 3
START_TIMEOUT_S = 120.0


class NoProcessLeft(Unavailable):
    """No process has the user's code loaded any more, and none can be started."""


class ProcessPool:
    """`size` processes that each have loaded what `setup` names. Use it between `start` and `close`."""

    process: ClassVar[type[UserProcess]] = UserProcess
    """What it starts."""

    def __init__(
        self, setup: Setup, size: int, start_timeout_s: float = START_TIMEOUT_S, uses_at_once: int = 1
    ) -> None:
        """`start_timeout_s` limits the loading. A process is taken `uses_at_once` times at the same time."""
        self._setup = setup
        self._size = size
        self._uses_at_once = uses_at_once
        self._start_timeout_s = start_timeout_s
        self._alive: set[UserProcess] = set()
        self._idle: asyncio.Queue[UserProcess | None] = asyncio.Queue()
        """Each living process as often as it can be taken; dead ones until they are found."""
        self._replaced: set[UserProcess] = set()
        """Processes that were killed and have not ended yet."""
        self._starting: set[asyncio.Task[None]] = set()
        self._over: Unavailable | None = Unavailable("the pool of processes was not started.", "start it first.")
        self.restarts = 0
        """Number of processes that were replaced."""
        self.missing: tuple[Missing, ...] = ()
        """What does not separate the user's code from this replica, although it should."""

    @property
    def free(self) -> int:
        """How often a process can be taken without waiting."""
        return self._idle.qsize()

    async def start(self) -> None:
        """Starts the processes. Raises InvalidJob if the function cannot be loaded or a boundary that is required
        is missing, Unavailable if no process can be started."""
        self._over, self._idle = None, asyncio.Queue()
        started = await asyncio.gather(*(self._start_one() for _ in range(self._size)), return_exceptions=True)
        for failure in started:
            if isinstance(failure, BaseException):
                await self.close()
                raise failure
        for _ in range(self._uses_at_once):
            for worker in self._alive:
                self._idle.put_nowait(worker)
        self.missing = next(iter(self._alive)).missing or ()
        if self.missing:
            log.warning(
                "reward functions are not fully contained",
                missing={str(each.boundary): each.reason for each in self.missing},
                fix="allow user namespaces, or run the replica as root with CAP_SYS_ADMIN",
            )

    async def close(self) -> None:
        """Kills all processes and waits until they are gone. Calls in progress fail."""
        self._give_up(Unavailable("the scoring pool is closed.", "start another one."))
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._alive))
        self._alive.clear()

    async def _take(self) -> UserProcess:
        while self._over is None:
            worker = await self._idle.get()
            if worker is None:
                # The pool is closed. The None is put back for the next caller that waits.
                self._idle.put_nowait(None)
            elif worker.alive and worker not in self._replaced:
                return worker
            else:
                self._replace(worker)
        raise self._over

    def _give_back(self, worker: UserProcess, *, usable: bool) -> None:
        """Ends what `_take` began."""
        if usable:
            self._idle.put_nowait(worker)
        else:
            self._replace(worker)

    def _replace(self, worker: UserProcess) -> None:
        """Starts another process in the place of `worker`, once, however often it was taken."""
        worker.kill()
        if self._over is not None or worker in self._replaced or worker not in self._alive:
            return
        self.restarts += 1
        self._replaced.add(worker)
        self._starting.add(asyncio.create_task(self._start_another(worker)))

    async def _start_another(self, worker: UserProcess) -> None:
        await worker.end()
        self._alive.discard(worker)
        self._replaced.discard(worker)
        try:
            another = await self._start_one()
            for _ in range(self._uses_at_once):
                self._idle.put_nowait(another)
        except (InvalidJob, Unavailable) as error:
            log.error("a scoring process is lost", reason=str(error), left=len(self._alive))
            if not self._alive and self._starting == {asyncio.current_task()}:
                self._give_up(NoProcessLeft(f"no scoring process is left: {error.what}", error.fix))
        finally:
            self._starting.discard(asyncio.current_task())

    async def _start_one(self) -> UserProcess:
        """Starts a process. A function that cannot be loaded is an error at once; a process that dies meanwhile is
        tried again, at most START_ATTEMPTS times."""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                worker = await self.process.start(self._setup, self._start_timeout_s)
            except WorkerDied as death:
                reason = str(death)
                log.warning(
                    "a scoring process did not start", functions=self._setup.function, reason=reason, attempt=attempt
                )
            else:
                self._alive.add(worker)
                return worker
        named = f"{self._setup.field}: no process could load {self._setup.function}"
        raise Unavailable(
            f"{named} in {START_ATTEMPTS} attempts: it {reason}.",
            "see the replica's standard error; raise reward.memory_mb if the module imports large libraries.",
        )

    def _give_up(self, over: Unavailable) -> None:
        self._over = over
        self._idle.put_nowait(None)
