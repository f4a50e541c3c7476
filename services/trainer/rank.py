"""One rank of the trainer, as a process: from joining the others to its end."""

import os
import sys

# torch reads these when it is loaded. A wait that reaches its time limit is not worth a warning. Threads that wait for
# each other sleep instead of spinning: with an engine on the same cores a step would otherwise take ten times as long.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# transformers and PEFT import torchao if it is installed, as SGLang has it, and that starts CUDA, before ranks are
# forked too. Nothing here uses it: they find that it is not there.
sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]

import signal
import socket
from collections.abc import Callable

import structlog
import torch.distributed as dist
from torch.distributed import DistError

from millrace.errors import MillraceError
from millrace.ids import MemberId, new_member_id
from millrace.telemetry import logs
from millrace.telemetry.spans import export
from millrace.wire.address import host_address
from services.trainer.checkpoints.background_saver import BackgroundSaver
from services.trainer.publication.sender import Sender
from services.trainer.ranks.commands import CommandLoop, CommandSender, ControlThread
from services.trainer.ranks.heartbeats import Heartbeats
from services.trainer.ranks.world import World
from services.trainer.service.rank_zero import RankZero
from services.trainer.service.worker import Worker

log = structlog.get_logger(__name__)


def serve(coordinator: str, port: int, silent_s: float, metrics_port: int) -> int:
    """Runs one rank, as the environment says which; returns the exit status. See SilentOption, MetricsPortOption."""
    member_id = new_member_id("trainer")
    rank = os.environ.get("RANK", "0")
    named = member_id if rank == "0" else f"rank-{rank}"
    logs.configure("trainer", named)
    try:
        export.configure("trainer", named)
    except MillraceError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    return run(coordinator, port, silent_s, metrics_port, member_id)


def run(coordinator: str, port: int, silent_s: float, metrics_port: int, member_id: MemberId) -> int:
    """Runs this rank until the trainer ends; returns the exit status."""
    world = World.join()
    control = ControlThread()
    sender = Sender(world.rank, member_id)
    heartbeats = Heartbeats(world, silent_s)
    saver = BackgroundSaver(world, heartbeats)
    drain = heartbeats.drain
    if world.rank == 0:
        sent = CommandSender(world, heartbeats)
        rank_zero = RankZero(world, sent, heartbeats, sender, saver, member_id, coordinator, control.loop)
        drain = rank_zero.drain
    worker = Worker(world, control, sender, saver)
    commands = CommandLoop(world, worker.handlers)
    heartbeats.start(on_drain=drain)
    _on_signals(control, drain)
    if world.rank == 0:
        rank_zero.start(host_address(), port, metrics_port)
    try:
        commands.run()
    except DistError as error:
        log.error("rank 0 cannot be reached: this rank ends", rank=world.rank, error=str(error))
        return 1
    finally:
        worker.release_copies()
    heartbeats.stop()
    control.stop()
    export.flush()
    dist.destroy_process_group()
    return 0


def _on_signals(control: ControlThread, drain: Callable[[], None]) -> None:
    """SIGTERM and SIGINT drain at once, also while the main thread is busy: the control thread reads the signals."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def on_signal() -> None:
        if reader.recv(64):
            drain()

    control.loop.call_soon_threadsafe(control.loop.add_reader, reader.fileno(), on_signal)
    _SIGNAL_SOCKETS.extend((reader, writer))


_SIGNAL_SOCKETS: list[socket.socket] = []
"""The sockets stay open as long as the process lives."""
