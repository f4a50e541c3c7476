"""The version in place on its way from one worker to siblings that join."""

from contextlib import nullcontext

import torch

from millrace.weights.plans.memory import Memory
from millrace.weights.plans.wire_layouts import Planner
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.pipeline import SendPipeline
from millrace.weights.transfer.session import PublicationSession
from services.rollout.weights.in_worker.transfer_thread import TransferThread
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Sent


class OutgoingTransfer:
    """Everything that takes a while, the planning too, is done in its thread: the engine generates meanwhile."""

    def __init__(self, request: TransferRequest, rank: int, memory: Memory) -> None:
        """`memory` holds the boxes that the request names for sender `rank`."""
        self.session = PublicationSession()
        self._request = request
        self._rank = rank
        self._memory = memory
        self._thread = TransferThread(request, rank, self._send, memory.device, self.session)

    def begin(self) -> None:
        """Starts sending and returns at once."""
        self._thread.begin()

    def wait(self, at_most_s: float | None = None) -> Sent | None:
        """Waits for the last byte to be sent; None where it is not in time. Raises PublicationFailed where it will not
        be."""
        return self._thread.wait(at_most_s)

    def close(self) -> None:
        """Ends what is under way; returns once nothing reads the memory any more."""
        self._thread.close()

    def _send(self, channel: Channel) -> Sent:
        plan = Planner().plan(self._request.manifest, self._request.layouts)
        device = self._memory.device
        # A new thread starts on the first GPU, whichever GPU its engine uses.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            pipeline = SendPipeline(plan, self._rank, self._memory)
            sums, times = pipeline.run(channel)
        return Sent(tuple(sums.items()), times.pack_s, times.verify_s, pipeline.slot_bytes)
