"""The layout of one worker: which boxes of a manifest it wants, where they lie, and whose bytes lie there."""

import itertools

from millrace.errors import PublicationFailed
from millrace.weights.loader.learn import LearnedLayout, learn_layout
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Content, Manifest
from millrace.weights.plans.memory import Memory
from services.rollout.weights.in_worker.model import WorkerModel, part_of
from services.rollout.weights.transfer_request import TransferRequest

MAX_NAMES = 64
"""Tensors that went through the loader and are reported by name."""


class WorkerLayout:
    """Learned from the model's loader once for each manifest; the latest manifest of each content is kept."""

    def __init__(self, model: WorkerModel) -> None:
        self._model = model
        self._learned: dict[Content, tuple[bytes, LearnedLayout]] = {}
        """Hash of the manifest, and the layout that was learned for it."""
        self._holds: dict[Content, str] = {}
        """Key of the publication whose bytes the layout's buffers hold whole; missing for none."""

    def of(self, manifest: Manifest) -> LearnedLayout:
        """Raises InvalidJob if the loader refuses the manifest."""
        known = self._learned.get(manifest.content)
        if known is None or known[0] != manifest.hash:
            self.being_written(manifest)
            part = part_of(self._model, manifest.content)
            known = (manifest.hash, learn_layout(part.load, manifest, part.loaded, part.padded))
            self._learned[manifest.content] = known
        return known[1]

    def being_written(self, manifest: Manifest) -> None:
        """Records that the layout's buffers hold no publication whole."""
        self._holds.pop(manifest.content, None)

    def written(self, manifest: Manifest, key: str) -> None:
        """Records that the layout's buffers hold the publication `key`."""
        self._holds[manifest.content] = key

    def holds(self, content: Content) -> str:
        """Key of the publication that the layout's buffers hold whole; empty for none."""
        return self._holds.get(content, "")

    def boxes(self, manifest: Manifest) -> Boxes:
        """The boxes that this worker wants."""
        return self.of(manifest).memory.layout.boxes

    def check_receiver(self, request: TransferRequest, rank: int) -> None:
        """Raises PublicationFailed if `request` was planned for other boxes than this worker wants."""
        receivers = wire_layouts.decode(request.layouts.receivers)
        number = rank - (request.world_size - len(receivers))
        boxes = self.boxes(request.manifest)
        if not 0 <= number < len(receivers) or receivers[number].hash != boxes.hash:
            raise PublicationFailed(f"rank {rank} wants other boxes than the publication was planned for.")

    def sender_memory(self, request: TransferRequest, rank: int, served: str) -> Memory:
        """The memory with what publication `served` put in place, to be sent. Raises PublicationFailed if it is not
        here as it was published, and if the copy was planned for other boxes than this worker holds."""
        learned, senders = self.of(request.manifest), wire_layouts.decode(request.layouts.senders)
        if learned.loader_tensors and self.holds(request.manifest.content) != served:
            names = ", ".join(list(learned.loader_tensors)[:3])
            raise PublicationFailed(f"{names} are held only as the engine changed them.", "the trainer sends them.")
        if not 0 <= rank < len(senders) or senders[rank].hash != learned.memory.layout.boxes.hash:
            raise PublicationFailed(f"rank {rank} holds other boxes than the copy was planned for.")
        return learned.memory

    def loader_names(self, manifest: Manifest) -> tuple[str, ...]:
        """The first MAX_NAMES of the tensors that go whole through the loader."""
        return tuple(itertools.islice(self.of(manifest).loader_tensors, MAX_NAMES))
