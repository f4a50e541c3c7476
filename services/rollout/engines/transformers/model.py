"""The Hugging Face model of the `transformers` engine, and its tensors as the receiver writes them."""

import os
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from millrace.data.quantization import engine_overrides
from millrace.errors import InvalidJob, PublicationFailed, refused
from millrace.spec import JobSpec
from millrace.spec.pool import PoolTask
from millrace.weights.folder_tensors import Unread
from millrace.weights.loader.stored import published_dtype, stored_tensors, views
from millrace.weights.plans.manifest import Manifest
from services.rollout.engine import PoolModel, compute_threads
from services.rollout.engines.adapter import AdapterShape, AdapterTensors, adapter_shape, not_served
from services.rollout.engines.options import check_tied_head


class AdapterSlot(AdapterTensors):
    """See `LoadedPart`. Zero at first: the model computes as without it."""

    def __init__(self, model: nn.Module, shape: AdapterShape, dtype: str) -> None:
        """Raises InvalidJob if the model has no such linear layer."""
        super().__init__(shape, dtype)
        self._tensors: dict[str, Tensor] = {}
        for layer in shape.layers:
            linear = _linear(model, layer.name)
            like = {"dtype": getattr(torch, dtype), "device": linear.weight.device}
            lora_a_ri = self._tensors[layer.lora_a] = torch.zeros(shape.rank, layer.inputs, **like)
            lora_b_or = self._tensors[layer.lora_b] = torch.zeros(layer.outputs, shape.rank, **like)
            linear.register_forward_hook(partial(_add, lora_a_ri, lora_b_or))

    @property
    def loaded(self) -> Mapping[str, Tensor]:
        return self._tensors

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self._tensors[name].copy_(tensor)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    try:
        part = model.get_submodule(name)
    except AttributeError:
        part = model
    if not isinstance(part, nn.Linear):
        raise not_served(f"transformers has no linear layer {name} in this model")
    return part


def _add(lora_a_ri: Tensor, lora_b_or: Tensor, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """The layer's output with the adapter's: W x + B (A x)."""
    return output + functional.linear(functional.linear(inputs[0], lora_a_ri), lora_b_or)


class StoredModel:
    """A Hugging Face model as the weight receiver sees it (`WorkerModel`). Its tensors are published under the names,
    and in the pieces, that its model folder stores; its loader is a copy."""

    rank = 0
    padded: frozenset[str] = frozenset()

    def __init__(self, model: Any, spec: JobSpec) -> None:
        """Raises InvalidJob if the folder stores a tensor in another way than the model keeps it in memory, or the
        model cannot have the job's adapter."""
        self._model = model
        shape = adapter_shape(spec)
        self.adapter = None if shape is None else AdapterSlot(model, shape, spec.rollout.dtype)
        self._views: dict[str, Tensor] = {}
        """Views of the model's tensors, named and cut as its folder stores them."""
        for name, tensor in stored_tensors(model):
            if (found := views(model, name, tensor)) is None:
                what = f"model.path: {spec.model.path} stores {name} otherwise than transformers keeps it in memory."
                raise InvalidJob(what, "use vLLM.")
            self._views |= found

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return {**dict(self._model.named_parameters()), **(self.adapter.loaded if self.adapter is not None else {})}

    @cached_property
    def loaded(self) -> Mapping[str, Tensor]:
        return dict(stored_tensors(self._model))

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self._views[name].copy_(tensor)

    def check(self, manifest: Manifest) -> None:
        """See `WorkerModel`. Names, shapes and dtypes have to be the model's."""
        held = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self._views.items()}
        published = {t.name: (t.shape, t.dtype) for t in manifest.tensors}
        if differing := sorted(set(held.items()) ^ set(published.items())):
            names = sorted({name for name, _ in differing})
            what = f"{len(names)} tensors differ in name, shape or dtype: {', '.join(names[:5])}."
            raise PublicationFailed(what, "see that trainer and engine load the same model folder in the same dtype.")

    def update_derived(self) -> None:
        """See `WorkerModel`. Nothing is derived."""


def random_model(spec: JobSpec, device: str, attention: str) -> Any:
    """The job's model with weights of no meaning, on `device`; if that is empty, on the first GPU if there is one.
    Raises InvalidJob if it cannot be built here."""
    trust, device = spec.model.trust_remote_code, device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = AutoConfig.from_pretrained(spec.model.path, trust_remote_code=trust)
        config.update(engine_overrides(spec.model.path))
        others = set(getattr(config.get_text_config(), "layer_types", None) or []) - {
            "full_attention",
            "sliding_attention",
        }
        if others:
            reason = f"this engine cannot run layers of kind {', '.join(others)}"
            raise refused("model.path", spec.model.path, reason, "choose a model with full attention.")
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, spec.rollout.dtype),
            attn_implementation=attention_for(config, attention),
            trust_remote_code=trust,
        )
        return _with_float32_kept(model).to(device).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        what = f"model.path: {spec.model.path} cannot be built by transformers on {device}: {error}."
        raise InvalidJob(what, "give a Hugging Face model folder of an architecture that it knows.") from error


def attention_for(config: Any, asked: str) -> str:
    """The attention for a model with this config: torch's own leaves out a soft cap."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if asked == "sdpa" and capped else asked


def _with_float32_kept(model: Any) -> Any:
    """The model with those tensors in float32 that have to be in any model; from_config does not take care of it."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if published_dtype(model, name, "") == "float32":
            tensor.data = tensor.data.to(torch.float32)
    return model


def load(model: PoolModel, device: str, attn_implementation: str) -> Any:
    """The model on the device, which is a GPU if there is one and `device` is empty. Raises InvalidJob."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(compute_threads())
    pool, field = model.pool, f"{model.field}.path"
    kind: Any = AutoModelForSequenceClassification if model.task is PoolTask.REWARDS else AutoModelForCausalLM
    try:
        loaded, report = kind.from_pretrained(
            pool.path,
            dtype=getattr(torch, pool.dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=pool.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = f"{field}: {pool.path} cannot be loaded by transformers: {error}."
        raise InvalidJob(what, "give a Hugging Face model folder of an architecture that it knows.") from error
    if missing := sorted(report["missing_keys"]):
        reason = f"has no weights for {', '.join(missing[:3])}, without which it cannot give {model.task}"
        raise refused(field, pool.path, reason, "give the folder of a trained model of that kind.")
    heads = [r"^lm_head\."] if model.task is PoolTask.REWARDS else []
    layers = getattr(loaded.config.get_text_config(), "num_hidden_layers", None)
    unread = Unread.of(report["unexpected_keys"], (), tied={}, ignored=heads, layers=layers)
    unread.check(f"{field}: {pool.path}")
    check_tied_head(model)
    if model.task is PoolTask.REWARDS and loaded.config.num_labels != 1:
        fix = "give a model with one label, whose number is the reward."
        raise refused(field, pool.path, f"its head has {loaded.config.num_labels} labels", fix)
    return loaded.to(device).eval()


def device_name(model: Any) -> str:
    """The name of the GPU that holds the model, or cpu."""
    device = model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
