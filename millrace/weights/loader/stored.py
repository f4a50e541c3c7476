"""A Hugging Face model's tensors as its model folder stores them: under other names and in other pieces than the module
has them (all experts of a layer are one parameter)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a model folder stores: parameters, each storage once, and persistent buffers; by this module's names."""
    parameters = dict(module.named_parameters())
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(parameters)
    for name, tensor in module.state_dict().items():
        if name not in tied:
            yield name, tensor


def pieces(module: nn.Module, name: str, whole: Tensor) -> dict[str, Tensor]:
    """What of `whole`, the module's tensor `name`, is stored under which name."""
    if not isinstance(module, PreTrainedModel):
        return {name: whole}
    return revert_weight_conversion(module, {name: whole})


def views(module: nn.Module, name: str, whole: Tensor) -> dict[str, Tensor] | None:
    """As `pieces`, in the memory of `whole`; None where some of it is stored otherwise than it lies there."""
    with _NoCopies():
        found = pieces(module, name, whole)
    storage = whole.untyped_storage()._cdata
    return found if all(view.untyped_storage()._cdata == storage for view in found.values()) else None


def dtype_of(module: nn.Module, name: str, asked: str) -> str:
    """In which dtype a tensor is published where `asked` is: some stay float32 whatever is asked for, as a router's
    bias, which in less would send tokens to other experts."""
    kept = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    return "float32" if any(part in kept for part in name.split(".")) else asked


class _NoCopies(TorchDispatchMode):
    """A copy is the tensor itself, so that one sees what of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))
