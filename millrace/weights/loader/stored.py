"""A Hugging Face model's tensors as its model folder stores them: under other names and in other pieces than in the
module, where all experts of a layer are one parameter."""

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from millrace.weights.folder_tensors import TURNED, stored_name
from millrace.weights.plans.views import ViewedBox, viewed_box

EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
"""Endings of the names of a layer's experts."""


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a model folder stores, by this module's names: parameters, each storage once, and persistent
    buffers."""
    parameters = dict(module.named_parameters())
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(parameters)
    for name, tensor in module.state_dict().items():
        if name not in tied:
            yield name, tensor


def pieces(module: nn.Module, name: str, whole: Tensor) -> dict[str, Tensor]:
    """The tensors that are stored for `whole`, the module's tensor `name`, by their stored names."""
    if not isinstance(module, PreTrainedModel):
        return {name: whole}
    found = _reverted(module, {name: whole})
    if module.config.model_type != TURNED:
        return found
    return {piece: part.transpose(1, 2) if piece.endswith(EXPERTS) else part for piece, part in found.items()}


def _reverted(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers' `revert_weight_conversion` returns, which looks through all modules at every call."""
    if getattr(module, "_weight_conversions", None) is not None:
        return dict(revert_weight_conversion(module, tensors))
    of, conversions = getattr(module, "_known_conversions", (None, []))
    if of is not type(module):  # some are found by the class, which changes when a module is sharded
        every = get_model_conversion_mapping(module, add_legacy=False)
        conversions = [each for each in every if not isinstance(each, PrefixChange)]
        module._known_conversions = type(module), conversions
    if not conversions:
        return tensors
    module._weight_conversions = conversions
    try:
        return dict(revert_weight_conversion(module, tensors))
    finally:
        module.__dict__.pop("_weight_conversions", None)


def follow_folder(module: Any, names: Container[str]) -> None:
    """Makes `pieces` keep the experts of a layer in one tensor if the model folder, whose tensors have these `names`,
    stores them so. `module`: a PreTrainedModel. Those that transformers loads do so by themselves."""
    split = [name for name, tensor in stored_tensors(module) if len(pieces(module, name, tensor)) > 1]
    if split and all(stored_name(name, names) in names for name in split):
        module._weight_conversions = []


def views(module: nn.Module, name: str, whole: Tensor) -> dict[str, Tensor] | None:
    """The same as views of `whole`; None if one of them is not a view of it."""
    with _NoCopies():
        found = pieces(module, name, whole)
    storage = whole.untyped_storage()._cdata
    return found if all(view.untyped_storage()._cdata == storage for view in found.values()) else None


def stored_boxes(
    module: nn.Module, name: str, shape: Sequence[int]
) -> dict[str, tuple[ViewedBox, tuple[int, ...]]] | None:
    """For each tensor that is stored for the module's tensor `name`, which has this shape: the box of it that is
    stored, and the shape that the stored tensor has. None if one of them is not such a box."""
    found = {}
    if (stored := views(module, name, torch.empty(shape, device="meta"))) is None:
        return None
    for piece, view in stored.items():
        box = viewed_box(shape, (int(view.storage_offset()), tuple(view.shape), tuple(view.stride())))
        if box is None:
            return None
        found[piece] = box, tuple(view.shape)
    return found


def published_dtype(module: nn.Module, name: str, asked: str) -> str:
    """The dtype in which a tensor is published: `asked`, except for tensors that stay float32, as a router's bias,
    which would send tokens to other experts if it were rounded."""
    kept = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    return "float32" if any(part in kept for part in name.split(".")) else asked


class _NoCopies(TorchDispatchMode):
    """`clone` returns the tensor itself, so that a copy can be recognised by its storage."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))
