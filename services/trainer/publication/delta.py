"""The sending ranks of a publication that sends only what changed since the version that the receivers hold.

It is the sharded transfer with another channel: plan, communicator, rounds and checksums are the same. What is added is
a snapshot of what was sent last, in host memory (`millrace/weights/transfer/delta/exchange.py`), and this rule:

**Changes are sent only against a publication that every rank has kept whole and every receiver has put in place.** Rank
0 learns of the latter by `finish`; until then, and after any failure, the snapshot counts as nobody's. PREPARE names
that publication to the receivers, and a receiver that holds another one asks for everything.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from millrace.contracts.v1 import weights_pb2
from millrace.contracts.v1.trainer_pb2 import PrepareSendRequest, PrepareSendResponse, TransferSendRequest
from millrace.errors import PublicationFailed
from millrace.weights.phases import PublicationId
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.delta.exchange import SendingDeltas, Snapshot
from millrace.weights.transfer.pipeline import TransferTimes
from services.trainer.memory import exhausted
from services.trainer.protocol.backend import Backend
from services.trainer.publication.sharded import Prepared, ShardedTransfer
from services.trainer.ranks import collectives


class DeltaTransfer(ShardedTransfer):
    """An `OutgoingTransfer`."""

    def __init__(self, rank: int, member_id: str) -> None:
        super().__init__(rank, member_id)
        self._snapshot: Snapshot | None = None
        self._base: PublicationId | None = None
        """The publication that changes can be sent against, as all ranks agreed in PREPARE."""
        self._kept: PublicationId | None = None
        """The publication whose messages the snapshot holds whole."""
        self._committed: PublicationId | None = None
        """The publication that succeeded last; on rank 0 only."""
        self._sent = np.zeros(3, np.int64)
        """Figures of the last transfer: bytes sent, 16-bit words compared, words changed."""

    def prepare_send(self, request: PrepareSendRequest, backend: Backend) -> PrepareSendResponse:
        """See `ShardedTransfer.prepare`. Raises PublicationFailed if there is no host memory for the snapshot."""
        answer = super().prepare_send(request, backend)
        with collectives.fail_together(), exhausted.as_error():
            self._make_snapshot()
        own = self._kept if self._rank > 0 or self._kept == self._committed else None
        ref = weights_pb2.PublicationRef() if own is None else own.to_proto()
        of_ranks = collectives.gather_bytes(ref.SerializeToString(deterministic=True))
        self._base = own if own is not None and len(set(of_ranks)) == 1 else None
        if self._base is not None:
            answer.base.CopyFrom(ref)
        return answer

    def _make_snapshot(self) -> None:
        """Keeps the snapshot as long as the plan, and with it the messages, stay the same."""
        assert self._prepared is not None
        plan, pipeline = self._prepared.plan, self._prepared.pipeline
        if self._snapshot is not None and self._snapshot.plan_hash == plan.hash:
            return
        self._snapshot = self._kept = None  # frees its memory before more is taken
        size = sum(pipeline.packed.values())
        try:
            self._snapshot = Snapshot(plan.hash, pipeline.packed, pipeline.device)
        except torch.OutOfMemoryError:  # of the device; `as_error` says that
            raise
        except RuntimeError as error:  # torch's out of memory
            what = f"rank {self._rank} of the trainer has no {size / 1e9:.1f} GB of host memory to keep what it sends."
            raise PublicationFailed(what, 'set publication.path to "sharded".') from error

    def _send(
        self, prepared: Prepared, channel: Channel, request: TransferSendRequest
    ) -> tuple[Mapping[int, int], TransferTimes]:
        assert self._snapshot is not None, "PREPARE makes it"
        whole = request.whole or self._base is None
        self._kept = self._committed = None  # until everything is sent, and then until everything is in place
        exchange = SendingDeltas(channel, self._snapshot, prepared.pipeline.stream, whole=whole)
        checksums, times = prepared.pipeline.run(exchange)
        self._kept = prepared.publication
        self._sent = np.array([exchange.sent_bytes, exchange.packed_words, exchange.changed_words], np.int64)
        return checksums, replace(times, code_s=exchange.encode_s)

    def _report(self, prepared: Prepared, times: TransferTimes, seconds: float) -> weights_pb2.MemberReport:
        report = super()._report(prepared, times, seconds)
        of_ranks = [np.frombuffer(data, np.int64) for data in collectives.gather_bytes(self._sent.tobytes())]
        sent, words, changed = np.sum(of_ranks, axis=0).tolist()
        assert self._snapshot is not None
        report.sent_bytes, report.changed = sent, changed / words if words else 0.0
        report.snapshot_bytes = int(collectives.maxima({"snapshot": float(self._snapshot.bytes)})["snapshot"])
        return report

    def finish(self, *, failed: bool) -> None:
        """See `OutgoingTransfer`. After success the receivers hold what the snapshot holds."""
        if not failed and self._prepared is not None:
            self._committed = self._prepared.publication
        super().finish(failed=failed)

    def close(self) -> None:
        super().close()
        self._snapshot = self._kept = self._committed = None
