"""A version on its way into one worker as what changed in it: the worker puts the changes onto what it holds."""

from dataclasses import replace

from millrace.weights.transfer.channels.channel import MessageExchange
from millrace.weights.transfer.delta.exchange import ReceivingDeltas
from millrace.weights.transfer.pipeline import ReceivedMessages, ReceivePipeline
from services.rollout.weights.in_worker.sharded import IncomingShards, ShardedPath
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Prepared


class DeltaPath:
    """See `IncomingPath`. A delta is received by the pipeline of the sharded path and over its communicator: only what
    a message is made of differs."""

    def __init__(self, sharded: ShardedPath) -> None:
        self._sharded = sharded

    def prepare(self, request: TransferRequest, rank: int) -> Prepared:
        """See `IncomingPath`."""
        return self._sharded.prepare(request, rank)

    def transfer(self, request: TransferRequest, rank: int, *, shadow: bool) -> IncomingShards:
        """See `IncomingPath`."""

        def receive(pipeline: ReceivePipeline, channel: MessageExchange) -> ReceivedMessages:
            exchange = ReceivingDeltas(channel, pipeline.stream)
            received = pipeline.run(exchange, onto_base=bool(request.base))
            return replace(received, times=replace(received.times, code_s=exchange.decode_s))

        return self._sharded.transfer(request, rank, shadow=shadow, receive=receive)
