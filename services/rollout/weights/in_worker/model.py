"""The model of one engine worker as the receiver sees it, and as it was before its engine wrapped layers to add an
adapter to their output; and its layout: which boxes of a manifest it wants, where they lie, and whose bytes lie there.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch

from millrace.errors import PublicationFailed
from millrace.weights.folder_tensors import TOWER, inside
from millrace.weights.loader.learn import LearnedLayout, learn_layout
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Content, Manifest
from millrace.weights.plans.memory import Memory
from services.rollout.weights.transfer_request import TransferRequest


def without_adapters(module: Any, wrapper: type[Any]) -> Any:
    """`module` with every layer of type `wrapper` replaced by the `base_layer` in it. Modules that hold such a layer
    are copied; parameters and all other modules are those of `module` itself.

    Loaders of models know the names of the parameters without the wrappers: `qkv_proj.weight`, and not
    `qkv_proj.base_layer.weight`. The engine's own module must not be changed for a loader that runs during generation.
    """
    if isinstance(module, wrapper):
        return without_adapters(module._modules["base_layer"], wrapper)
    inner = {name: without_adapters(child, wrapper) for name, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in inner.items()):
        return module
    copied = copy.copy(module)
    copied.__dict__["_modules"] = {**module._modules, **inner}
    return copied


NAMES = ("W_UK_T", "W_UV", "W_UK_T_dcp_qrep")
OUTER = "model."


class DerivedTensors:
    """The derived tensors of one model."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """`model` is a torch module that its engine has loaded for `dtype`."""
        self._dtype = dtype
        self._recompute = getattr(model, "post_load_weights", None)
        modules = [(path, module) for path, module in model.named_modules() if any(_derived_of(module))]
        self.names = frozenset(f"{path}.{name}" for path, module in modules for name, _ in _derived_of(module))
        """Their names among the model's parameters, if they are parameters."""
        loaded = {_storage(p) for name, p in model.named_parameters() if name not in self.names}
        self._copies = [m for _, m in modules if any(_storage(tensor) not in loaded for _, tensor in _derived_of(m))]

    def update(self) -> None:
        """Computes them from the parameters as they are now. Only while generation is paused."""
        with torch.no_grad():
            for module in self._copies:
                before = list(_derived_of(module))
                module.process_weights_after_loading(self._dtype)
                for name, tensor in before:
                    if (now := getattr(module, name)).data_ptr() != tensor.data_ptr():
                        tensor.copy_(now)
                        setattr(module, name, tensor)
            if self._recompute is not None:
                self._recompute()


def _derived_of(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in NAMES:
        if isinstance(tensor := getattr(module, name, None), torch.Tensor):
            yield name, tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class LoadedPart(Protocol):
    """What a publication of one content writes in a worker: the model's own parameters, or the adapter's."""

    @property
    def loaded(self) -> Mapping[str, torch.Tensor]:
        """The tensors that `load` writes, by name; tied ones may appear under several names."""

    @property
    def padded(self) -> frozenset[str]:
        """Names of loaded tensors that are larger than what is published, as a vocabulary padded for the kernels."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """The engine's own loader: takes tensors by their names in the manifest and writes them to parameters."""

    def check(self, manifest: Manifest) -> None:
        """Raises PublicationFailed for a manifest that the loader would take wrongly without an error."""

    def update_derived(self) -> None:
        """Computes again what the engine derives from these tensors. Only while generation is paused."""


class WorkerModel(LoadedPart, Protocol):
    """What the receiver needs of a worker's model. It is itself the part of the model's own parameters."""

    rank: int
    """Rank of the worker in its engine."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every parameter by name, those of the adapter included."""

    @property
    def adapter(self) -> LoadedPart | None:
        """The adapter that every request uses, zero at first; its tensors are named as in Content.ADAPTER. None if
        the engine was started without one."""


def part_of(model: WorkerModel, content: Content) -> LoadedPart:
    """The part of the model that a publication of `content` writes. Raises PublicationFailed if there is none."""
    if content is not Content.ADAPTER:
        return model
    if (adapter := model.adapter) is None:
        raise PublicationFailed("this engine has no place for an adapter.", "set model.lora.merge to true.")
    return adapter


def loader_name(name: str, model: Any) -> str:
    """The name that vLLM's loader of the model takes for the tensor that is trained and published as `name`. A model
    with a tower beside its language model may know the language model's tensors only as the model folder names them."""
    known = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", None) or {}
    if inside(OUTER) not in known or OUTER in known or not name.startswith(OUTER):
        return name
    return name if name.startswith((inside(OUTER), f"{OUTER}{TOWER}")) else inside(name)


class EngineModel:
    """Implements `WorkerModel` in a worker of vLLM or SGLang, whose model has `load_weights`. It is looked at when it
    is first needed."""

    def __init__(
        self, rank: int, get_model: Callable[[], Any], dtype: torch.dtype, *, with_tower: bool = False
    ) -> None:
        """`dtype` is the one that the engine was configured for. `with_tower`: publications bring the tower for
        images."""
        self.rank = rank
        self._with_tower = with_tower
        self.adapter: LoadedPart | None = None
        self._get_model = get_model
        self._dtype = dtype

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {**self._own, **(self.adapter.loaded if self.adapter is not None else {})}

    @property
    def _own(self) -> Mapping[str, torch.Tensor]:
        """The model's own parameters."""
        return dict(self._get_model().named_parameters())

    @cached_property
    def loaded(self) -> Mapping[str, torch.Tensor]:
        others, ignored = self._derived.names, () if self._with_tower else (TOWER,)
        return {n: tensor for n, tensor in self._own.items() if n not in others and not n.startswith(ignored)}

    @cached_property
    def padded(self) -> frozenset[str]:
        modules = self._get_model().named_modules()
        return frozenset(f"{name}.weight" for name, module in modules if hasattr(module, "num_embeddings_padded"))

    @cached_property
    def _derived(self) -> DerivedTensors:
        return DerivedTensors(self._get_model(), self._dtype)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        model = self._get_model()
        return model.load_weights((loader_name(name, model), tensor) for name, tensor in tensors)

    def check(self, manifest: Manifest) -> None:
        """See `WorkerModel`. The dtypes have to be the engine's."""
        held = str(self._dtype).removeprefix("torch.")
        # Some parameters stay float32 whatever the model's dtype is, as a router's bias.
        kept = {_last_part(name) for name, p in self._own.items() if p.dtype == torch.float32}
        tensors = (t for t in manifest.tensors if not (t.dtype == "float32" and _last_part(t.name) in kept))
        if other := {t.dtype for t in tensors} - {held}:
            what = f"the manifest has tensors of {', '.join(sorted(other))}; the engine holds {held}."
            raise PublicationFailed(what, "publish in the dtype that Configure answered.")

    def update_derived(self) -> None:
        self._derived.update()


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


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
