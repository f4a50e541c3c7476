"""Writes checkpoints while training continues, one at a time.

Each rank writes its part from a separate thread and reports it through the store of commands. Rank 0 puts the
checkpoint in its place once all ranks have reported.
"""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import InvalidState, MillraceError, Unavailable
from services.trainer.checkpoints.checkpoint import PendingCheckpoint
from services.trainer.ranks.heartbeats import Heartbeats
from services.trainer.ranks.world import World

log = structlog.get_logger(__name__)

POLL_S = 1.0


class BackgroundSaver:
    """The background writing of one rank. `begin` is called on the main thread, `outcome` is read from any thread."""

    def __init__(self, world: World, heartbeats: Heartbeats) -> None:
        self._world = world
        self._heartbeats = heartbeats
        self._store = world.connect(timeout_s=30.0)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._number = 0
        self.outcome: Future[pb.FinishSaveResponse] = Future()
        """Outcome of the newest save, known on rank 0 once it is on the disk. Raises InvalidState if it could not be
        written, Unavailable if a rank is lost."""
        self.outcome.set_result(pb.FinishSaveResponse())

    def check_free(self) -> None:
        """Raises InvalidState while this rank still writes a checkpoint that rank 0 does not wait for any more."""
        if not self.outcome.done():
            what = f"rank {self._world.rank} on {self._world.host} is still writing the previous checkpoint."
            raise InvalidState(what, "look at the disk there; save again later.")

    def begin(self, pending: PendingCheckpoint, deadline_s: float, began: float) -> None:
        """Starts to write, and returns at once. `began`: time.monotonic() when the save began. All ranks begin the same
        saves."""
        self._number += 1
        self.outcome = self._pool.submit(self._save, pending, self._number, began, began + deadline_s)

    def record(self, written: pb.FinishSaveResponse) -> None:
        """Records a save that was written without this class."""
        self.outcome = Future()
        self.outcome.set_result(written)

    def _save(self, pending: PendingCheckpoint, number: int, began: float, deadline: float) -> pb.FinishSaveResponse:
        self._store.set(f"saved/{number}/{self._world.rank}", json.dumps(self._write(pending)).encode())
        if self._world.rank != 0:
            return pb.FinishSaveResponse()
        try:
            self._wait_for_all(pending, number, deadline)
            size = pending.commit()
        except MillraceError as error:
            pending.discard()
            log.error("a checkpoint was not saved", path=str(pending.target), version=pending.version, error=str(error))
            raise
        return pb.FinishSaveResponse(version=pending.version, bytes=size, seconds=time.monotonic() - began)

    def _write(self, pending: PendingCheckpoint) -> str | None:
        """Writes this rank's part; returns the failure, None if there is none."""
        try:
            pending.write()
        except Exception as error:  # the outermost loop of the thread: rank 0 hears of it
            log.exception("a part of a checkpoint was not written", rank=self._world.rank)
            return f"{type(error).__name__}: {error}"
        return None

    def _wait_for_all(self, pending: PendingCheckpoint, number: int, deadline: float) -> None:
        """Waits until every rank has written its part. Raises InvalidState, Unavailable."""
        answers: dict[int, str | None] = {}
        """Failure of each rank that has reported, or None."""
        while missing := [rank for rank in range(self._world.size) if rank not in answers]:
            keys = {f"saved/{number}/{rank}": rank for rank in missing}
            self._store.wait(list(keys), POLL_S)
            answers |= {keys[key]: json.loads(data) for key, data in self._store.take(list(keys)).items()}
            unreported = [rank for rank in missing if rank not in answers]
            if lost := {rank: "is dead or stopped" for rank in self._heartbeats.silent() if rank in unreported}:
                raise Unavailable(self._message(pending, lost), _RESTART)
            if unreported and time.monotonic() > deadline:
                raise InvalidState(self._message(pending, dict.fromkeys(unreported, "did not finish in time")), _SLOW)
        if failed := {rank: failure for rank, failure in answers.items() if failure is not None}:
            raise InvalidState(self._message(pending, failed), _ROOM)

    def _message(self, pending: PendingCheckpoint, reasons: dict[int, str]) -> str:
        named = (f"rank {rank} on {self._heartbeats.host(rank)}: {why}" for rank, why in sorted(reasons.items()))
        return f"version {pending.version} was not saved to {pending.target}: {'; '.join(named)}."


_RESTART = "start the trainer again: its job continues from the previous checkpoint."
_SLOW = "look at the disk there, or raise deadlines.save_s."
_ROOM = "free disk space there, or let the trainer write to that folder; the previous checkpoint is unchanged."
