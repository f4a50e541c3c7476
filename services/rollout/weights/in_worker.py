"""The part of a replica that runs inside each of an engine's workers: vLLM's, and SGLang's schedulers.

Its methods are called by an inlet's thread, beside generation; those BETWEEN_BATCHES, and any that is asked for while
generation stands still, by the thread that generates. Every method returns plain data; a failure comes back as
`{"failed": ..., "fix": ...}`, since only text crosses the engine's own channels whole.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from millrace.errors import MillraceError, PublicationFailed
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.channels.rendezvous import nccl_id
from millrace.weights.transfer.checksum import checksum
from millrace.wire.v1 import weights_pb2
from services.rollout.weights.derived import Derived
from services.rollout.weights.sharded import Coming, Going, Shards
from services.rollout.weights.staging import Shelf, Staging
from services.rollout.weights.transfer_request import NO_PLAN, KnownPlan, TransferRequest
from services.rollout.weights.worker_rpc import Answer, Inlet, carried_out

LOOK_S = 0.05
"""How long a look at what is under way waits for its end."""


def _in_turn(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Whatever begins, places or forgets a transfer, one at a time; what it refuses is its answer."""

    @functools.wraps(method)
    def answered(receiver: "WeightReceiver", *arguments: Any) -> Answer:
        with receiver._millrace_turn:
            try:
                return method(receiver, *arguments)
            except MillraceError as error:
                return {"failed": error.what, "fix": error.fix}

    return answered


class WeightReceiver:
    """Uses `rank`, `model_config` and `get_model` of vLLM's Worker, which it is mixed into (`worker_extension_cls`), or
    of `sglang_worker.SglangReceiver`."""

    rank: int
    model_config: Any
    get_model: Callable[[], Any]
    _millrace_staging: Staging | None = None
    _millrace_shelf: Shelf | None = None
    _millrace_shards: Shards | None = None
    _millrace_derived: Derived | None = None
    _millrace_agreed: TransferRequest | None = None
    """A sharded transfer that was prepared and is not made ready yet."""
    _millrace_coming: Coming | None = None
    _millrace_staged: bool = True
    _millrace_source: Memory | None = None
    _millrace_going: Going | None = None
    _millrace_known: KnownPlan = NO_PLAN
    """What the last transfer's plan is about."""
    _millrace_inlet: Inlet | None = None
    _millrace_turn = threading.RLock()

    def millrace_open_inlet(self, path: str) -> Answer:
        """vLLM's: it is asked by vLLM's own call."""
        self._millrace_inlet = Inlet(path, {"rank": self.rank}, lambda request: carried_out(self, request))
        return {}

    @_in_turn
    def millrace_prepare(self, transfer_request: bytes) -> Answer:
        """Makes ready for a transfer, forgetting an unfinished one. Asks for it whole where it names a plan that this
        worker does not know."""
        self.millrace_abort()
        if (coming := TransferRequest.decode(transfer_request, self._millrace_known)) is None:
            return {"unknown": True}
        if not coming.plan_hash or coming.plan_hash != self._millrace_known.plan_hash:
            self._millrace_check(coming.manifest)
            self._millrace_known = KnownPlan.of(coming)
        if coming.sides is not None:
            fits = self._millrace_kept_shards().fits(coming, coming.first_rank + self.rank)
            self._millrace_agreed = coming
            return {"fits": fits}
        self._millrace_staging = Staging(coming, coming.first_rank + self.rank)
        return {}

    @_in_turn
    def millrace_describe(self, manifest: bytes) -> Answer:
        """What this worker wants of a manifest, and whether its parameters lie on a GPU."""
        told = Manifest.from_proto(weights_pb2.Manifest.FromString(manifest))
        self._millrace_check(told)
        return {"boxes": self._millrace_kept_shards().boxes(told).encode()}

    def millrace_checksums(self) -> Answer:
        """Of every parameter of the model, as it lies in this worker."""
        return {"checksums": {name: checksum(parameter) for name, parameter in self.get_model().named_parameters()}}

    @_in_turn
    def millrace_ready(self, staged: bool) -> Answer:
        """Makes slots or staging ready for the sharded transfer that was prepared."""
        coming, self._millrace_agreed = self._millrace_agreed, None
        if coming is None:
            return {"failed": "the publication was aborted.", "fix": ""}
        shards = self._millrace_kept_shards()
        self._millrace_coming = shards.prepare(coming, coming.first_rank + self.rank, staged=staged)
        self._millrace_staged = staged
        return {}

    @_in_turn
    def millrace_begin(self) -> Answer:
        """Starts receiving in a thread and returns at once: generation goes on."""
        if self._millrace_coming is not None:
            self._millrace_coming.begin()
            return {}
        if self._millrace_staging is None:
            return {"failed": "the publication was aborted.", "fix": ""}
        self._millrace_staging.begin()
        return {}

    def millrace_progress(self) -> Answer:
        """How far receiving is, after a moment."""
        if (coming := self._millrace_coming) is not None:
            coming.wait(LOOK_S)
            return self._millrace_received(coming)
        staging = self._millrace_staging
        if staging is None:
            return {"failed": "the publication was aborted.", "fix": ""}
        staging.wait(LOOK_S)
        if staging.failure is not None:
            return {"failed": staging.failure, "fix": ""}
        if not staging.done:
            return {"done": False}
        return {
            "done": True,
            "checksums": staging.checksums,
            "wire_s": staging.wire_s,
            "checksum_s": staging.checksum_s,
        }

    def _millrace_received(self, coming: Coming) -> Answer:
        if coming.failure is not None:
            return {"failed": coming.failure, "fix": ""}
        if not coming.done or coming.result is None:
            return {"done": False}
        times = coming.result.times
        contents = list(coming.result.sums.items())
        return {"done": True, "contents": contents, "wire_s": times.wire_s, "checksum_s": times.verify_s}

    @_in_turn
    def millrace_apply(self) -> Answer:
        """Puts the received version in place. Only while generation is paused."""
        coming, self._millrace_coming = self._millrace_coming, None
        if coming is not None:
            placed = self._millrace_kept_shards().place(coming, staged=self._millrace_staged)
            self._millrace_computed().follow()
            return {"unplaced": [], **asdict(placed)}
        staging, self._millrace_staging = self._millrace_staging, None
        if staging is None:
            return {"failed": "the publication was aborted.", "fix": ""}
        try:
            applied = self._millrace_filled_shelf().apply(staging)
            self._millrace_computed().follow()
        finally:
            staging.close()
        return {"apply_s": applied.apply_s, "compare_s": applied.compare_s, "unplaced": list(applied.unplaced)}

    @_in_turn
    def millrace_abort(self) -> Answer:
        self._millrace_agreed = None
        staging, self._millrace_staging = self._millrace_staging, None
        if staging is not None:
            staging.close()
        coming, self._millrace_coming = self._millrace_coming, None
        if coming is not None:
            coming.close()
        return {}

    @_in_turn
    def millrace_prepare_send(self, transfer_request: bytes, served: str) -> Answer:
        """Checks that what publication `served` put in place can be sent; NCCL's id where this rank has to make one."""
        self.millrace_end_send()
        self._millrace_source = self._millrace_kept_shards().source(_whole(transfer_request), self.rank, served)
        return {"nccl_id": nccl_id(self.rank == 0 and self._millrace_source.device.type == "cuda")}

    def millrace_send(self, transfer_request: bytes) -> Answer:
        """Starts sending in a thread and returns at once: generation goes on."""
        source, self._millrace_source = self._millrace_source, None
        if source is None:
            return {"failed": "the copy was ended.", "fix": ""}
        self._millrace_going = Going(_whole(transfer_request), self.rank, source)
        self._millrace_going.begin()
        return {}

    def millrace_sent(self) -> Answer:
        """How far sending is, after a moment."""
        if (going := self._millrace_going) is None:
            return {"failed": "the copy was ended.", "fix": ""}
        going.wait(LOOK_S)
        if going.failure is not None:
            return {"failed": going.failure, "fix": ""}
        if not going.done or going.result is None:
            return {"done": False}
        sums, times = going.result
        contents = list(sums.items())
        slots = going.slot_bytes
        return {"done": True, "contents": contents, "pack_s": times.pack_s, "sum_s": times.verify_s, "slots": slots}

    def millrace_end_send(self) -> Answer:
        """Nothing reads the parameters to send them after this."""
        going, self._millrace_going, self._millrace_source = self._millrace_going, None, None
        if going is not None:
            going.close()
        return {}

    def _millrace_check(self, manifest: Manifest) -> None:
        """Refuses what this engine would take wrongly without noticing."""
        held = str(self.model_config.dtype).removeprefix("torch.")
        # What stays float32 whatever the model's dtype is, as a router's bias.
        kept = {_last(name) for name, p in self.get_model().named_parameters() if p.dtype == torch.float32}
        other = {t.dtype for t in manifest.tensors if not (t.dtype == "float32" and _last(t.name) in kept)} - {held}
        if other:
            what = f"the manifest has tensors of {', '.join(sorted(other))}; the engine holds {held}."
            raise PublicationFailed(what, "publish in the dtype that Configure answered.")

    def _millrace_filled_shelf(self) -> Shelf:
        if self._millrace_shelf is None:
            self._millrace_shelf = Shelf(*self._millrace_held())
        return self._millrace_shelf

    def _millrace_kept_shards(self) -> Shards:
        if self._millrace_shards is None:
            self._millrace_shards = Shards(*self._millrace_held())
        return self._millrace_shards

    def _millrace_computed(self) -> Derived:
        if self._millrace_derived is None:
            self._millrace_derived = Derived(self.get_model(), self.model_config.dtype)
        return self._millrace_derived

    def _millrace_held(self) -> tuple[Callable[[Any], Any], dict[str, Any], frozenset[str]]:
        """The model's loader, the parameters that it loads, and the names of those that are padded."""
        model, computed = self.get_model(), self._millrace_computed().names
        modules = model.named_modules()
        padded = frozenset(f"{name}.weight" for name, module in modules if hasattr(module, "num_embeddings_padded"))
        held = {name: parameter for name, parameter in model.named_parameters() if name not in computed}
        return model.load_weights, held, padded


def _whole(transfer_request: bytes) -> TransferRequest:
    """Of a copy, which is encoded whole."""
    decoded = TransferRequest.decode(transfer_request, NO_PLAN)
    assert decoded is not None
    return decoded


def _last(name: str) -> str:
    return name.rpartition(".")[2]
