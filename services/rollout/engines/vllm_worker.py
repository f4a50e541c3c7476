"""The part of a replica that runs inside each of vLLM's workers, reached by `collective_rpc`.

Every method returns plain data; a failure comes back as `{"failed": ..., "mend": ...}`, since only text crosses the
engine's own channels whole.
"""

from collections.abc import Callable
from typing import Any

from millrace.errors import MillraceError, PublicationFailed
from services.rollout.delivery import Delivery
from services.rollout.staging import Shelf, Staging

Answer = dict[str, Any]


class WeightReceiver:
    """Mixed into vLLM's Worker (`worker_extension_cls`), whose `rank`, `model_config` and `get_model` it uses."""

    rank: int
    model_config: Any
    get_model: Callable[[], Any]
    _millrace_staging: Staging | None = None
    _millrace_shelf: Shelf | None = None

    def millrace_prepare(self, delivery: bytes) -> Answer:
        """Makes ready for a delivery, forgetting an unfinished one."""
        try:
            self.millrace_abort()
            self._millrace_check(coming := Delivery.decode(delivery))
        except MillraceError as error:
            return {"failed": error.what, "mend": error.mend}
        self._millrace_staging = Staging(coming, coming.first_rank + self.rank)
        return {}

    def millrace_begin(self) -> Answer:
        """Starts receiving in a thread and returns at once: generation goes on."""
        if self._millrace_staging is None:
            return {"failed": "the publication was aborted.", "mend": ""}
        self._millrace_staging.begin()
        return {}

    def millrace_progress(self) -> Answer:
        """How far receiving is. Never waits: the worker generates meanwhile."""
        staging = self._millrace_staging
        if staging is None:
            return {"failed": "the publication was aborted.", "mend": ""}
        if staging.failure is not None:
            return {"failed": staging.failure, "mend": ""}
        if not staging.done:
            return {"done": False}
        return {
            "done": True,
            "checksums": staging.checksums,
            "wire_s": staging.wire_s,
            "checksum_s": staging.checksum_s,
        }

    def millrace_apply(self) -> Answer:
        """Puts the received version in place. Only while generation is paused."""
        staging, self._millrace_staging = self._millrace_staging, None
        if staging is None:
            return {"failed": "the publication was aborted.", "mend": ""}
        try:
            applied = self._millrace_filled_shelf().apply(staging)
        except MillraceError as error:
            return {"failed": error.what, "mend": error.mend}
        finally:
            staging.close()
        return {"apply_s": applied.apply_s, "compare_s": applied.compare_s, "unplaced": list(applied.unplaced)}

    def millrace_abort(self) -> Answer:
        staging, self._millrace_staging = self._millrace_staging, None
        if staging is not None:
            staging.close()
        return {}

    def _millrace_check(self, delivery: Delivery) -> None:
        """Refuses what this engine would take wrongly without noticing."""
        held = str(self.model_config.dtype).removeprefix("torch.")
        if other := sorted({t.dtype for t in delivery.manifest.tensors} - {held}):
            what = f"the manifest has tensors of {', '.join(other)}; the engine holds {held}."
            raise PublicationFailed(what, "publish in the dtype that Configure answered.")

    def _millrace_filled_shelf(self) -> Shelf:
        if self._millrace_shelf is None:
            model = self.get_model()
            padded = frozenset(
                f"{name}.weight" for name, module in model.named_modules() if hasattr(module, "num_embeddings_padded")
            )
            self._millrace_shelf = Shelf(model.load_weights, dict(model.named_parameters()), padded)
        return self._millrace_shelf
