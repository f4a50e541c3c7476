"""Checkpoints written beside training: each rank writes its part from a thread of its own, and rank 0 puts the whole in
its place once it has heard from all of them, through the store of commands. One at a time."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from millrace.errors import InvalidState, MillraceError, Unavailable
from millrace.wire.v1 import trainer_pb2 as pb
from services.trainer.checkpoints.checkpoint import PendingCheckpoint
from services.trainer.ranks.heartbeats import Heartbeats
from services.trainer.ranks.world import World

log = structlog.get_logger(__name__)

POLL_S = 1.0
WRITTEN = b"written"


class BackgroundSaver:
    """This rank's. `begin` on the main thread; `outcome` from any."""

    def __init__(self, world: World, heartbeats: Heartbeats) -> None:
        self._world = world
        self._heartbeats = heartbeats
        self._store = world.connect(timeout_s=30.0)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._number = 0
        self.outcome: Future[pb.FinishSaveResponse] = Future()
        """On rank 0: of the newest save, once it is on the disk. Raises InvalidState where it could not be written,
        Unavailable where a rank is lost."""
        self.outcome.set_result(pb.FinishSaveResponse())

    def check_free(self) -> None:
        """Raises InvalidState while this rank still writes: rank 0 has given up waiting for it."""
        if not self.outcome.done():
            what = f"rank {self._world.rank} on {self._world.host} is still writing the checkpoint before."
            raise InvalidState(what, "look at the disk there; save again later.")

    def begin(self, pending: PendingCheckpoint, deadline_s: float, began: float) -> None:
        """Returns at once. `began`: time.monotonic() when the save did. All ranks begin the same saves."""
        self._number += 1
        self.outcome = self._pool.submit(self._save, pending, self._number, began, began + deadline_s)

    def done(self, written: pb.FinishSaveResponse) -> None:
        """The newest save is there already."""
        self.outcome = Future()
        self.outcome.set_result(written)

    def _save(self, pending: PendingCheckpoint, number: int, began: float, give_up: float) -> pb.FinishSaveResponse:
        self._store.set(f"saved/{number}/{self._world.rank}", self._write(pending))
        if self._world.rank != 0:
            return pb.FinishSaveResponse()
        try:
            self._hear(pending, number, give_up)
            size = pending.commit()
        except MillraceError as error:
            pending.discard()
            log.error("a checkpoint was not saved", path=str(pending.target), version=pending.version, error=str(error))
            raise
        return pb.FinishSaveResponse(version=pending.version, bytes=size, seconds=time.monotonic() - began)

    def _write(self, pending: PendingCheckpoint) -> bytes:
        try:
            pending.write()
        except Exception as error:  # the outermost loop of the thread: rank 0 hears of it
            log.exception("a part of a checkpoint was not written", rank=self._world.rank)
            return f"{type(error).__name__}: {error}".encode()
        return WRITTEN

    def _hear(self, pending: PendingCheckpoint, number: int, give_up: float) -> None:
        """Returns once every rank has written its part. Raises InvalidState, Unavailable."""
        answers: dict[int, bytes] = {}
        while missing := [rank for rank in range(self._world.size) if rank not in answers]:
            keys = {f"saved/{number}/{rank}": rank for rank in missing}
            self._store.wait(list(keys), POLL_S)
            answers |= {keys[key]: data for key, data in self._store.take(list(keys)).items()}
            still = [rank for rank in missing if rank not in answers]
            if lost := {rank: "is dead or stopped" for rank in self._heartbeats.silent() if rank in still}:
                raise Unavailable(self._told(pending, lost), _AGAIN)
            if still and time.monotonic() > give_up:
                raise InvalidState(self._told(pending, dict.fromkeys(still, "did not finish in time")), _SLOW)
        if failed := {rank: answer.decode() for rank, answer in answers.items() if answer != WRITTEN}:
            raise InvalidState(self._told(pending, failed), _ROOM)

    def _told(self, pending: PendingCheckpoint, reasons: dict[int, str]) -> str:
        named = (f"rank {rank} on {self._heartbeats.host(rank)}: {why}" for rank, why in sorted(reasons.items()))
        return f"version {pending.version} was not saved to {pending.target}: {'; '.join(named)}."


_AGAIN = "start the trainer again: its job goes on from the checkpoint before."
_SLOW = "look at the disk there, or raise deadlines.save_s."
_ROOM = "make room there, or let the trainer write to that folder; the checkpoint before is as it was."
