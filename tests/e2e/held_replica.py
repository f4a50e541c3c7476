"""A replica that a test can stop in any phase of a publication: `python -m tests.e2e.held_replica FOLDER OPTIONS...`.

FOLDER/hold-PHASE (prepare, transfer, verify, commit, or copy for what it sends to a sibling): it stays there while the
file is there, and says so by FOLDER/in-PHASE. FOLDER/replan: it works out another plan; FOLDER/corrupt: the first
message of a publication comes with a changed byte. Both once.

An engine may receive in processes of its own. Those are spawned, and so import this module once more, as `__mp_main__`
and with the same arguments: they are held as the replica is.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from millrace.weights.transfer.channels.channel import ChannelMessage, MessageExchange, PendingExchange
from millrace.weights.transfer.pipeline import ReceivePipeline, SendPipeline
from services.rollout.__main__ import app
from services.rollout.weights.in_worker import receiver, sharded
from services.rollout.weights.receiver import Agreed, PublicationReceiver

FOLDER = Path(sys.argv[1])
LOOK_EVERY_S = 0.01


def held(phase: str) -> bool:
    if not (FOLDER / f"hold-{phase}").exists():
        return False
    (FOLDER / f"in-{phase}").touch()
    return True


def once(what: str) -> bool:
    asked = (FOLDER / what).exists()
    (FOLDER / what).unlink(missing_ok=True)
    return asked


METHODS = {"prepare": "agree_on_plan", "verify": "verify", "commit": "commit"}
"""The receiver's method of each phase that can be held."""


def holding(phase: str) -> Callable[..., Any]:
    """The receiver's method, once the gate is open."""
    method = getattr(PublicationReceiver, METHODS[phase])

    async def waits(self: PublicationReceiver, *arguments: Any) -> Any:
        while held(phase):  # noqa: ASYNC110 - the test is another process
            await asyncio.sleep(LOOK_EVERY_S)
        answer = await method(self, *arguments)
        return Agreed(b"another") if phase == "prepare" and once("replan") else answer

    return waits


class HeldExchange:
    """A `MessageExchange`, which is what pipelines use of a channel."""

    def __init__(self, channel: MessageExchange, phase: str) -> None:
        self.check = channel.check
        self._channel, self._phase = channel, phase

    def exchange(
        self, sends: Sequence[ChannelMessage], receives: Sequence[ChannelMessage], stream: Any = None
    ) -> PendingExchange:
        while held(self._phase):
            self._channel.check()
            time.sleep(LOOK_EVERY_S)
        exchange = self._channel.exchange(sends, receives, stream)
        return Changed(exchange, receives[0]) if receives and once("corrupt") else exchange


class Changed:
    """Messages of which the first has another byte than was sent."""

    def __init__(self, exchange: PendingExchange, message: ChannelMessage) -> None:
        self.wait = exchange.wait
        self._exchange, self._message = exchange, message

    def wait_received(self, stream: Any = None) -> None:
        self._exchange.wait_received(stream)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._message.data[0] ^= 1


class HeldReceiving(ReceivePipeline):
    def run(self, channel: Any, *, onto_base: bool = False) -> Any:
        return super().run(HeldExchange(channel, "transfer"), onto_base=onto_base)


class HeldSending(SendPipeline):
    def run(self, channel: MessageExchange) -> Any:
        return super().run(HeldExchange(channel, "copy"))


if __name__ in ("__main__", "__mp_main__"):
    for phase, name in METHODS.items():
        setattr(PublicationReceiver, name, holding(phase))
    sharded.ReceivePipeline, receiver.SendPipeline = HeldReceiving, HeldSending  # type: ignore[misc]

if __name__ == "__main__":
    app(sys.argv[2:])
