"""Layers of GatedDeltaNet in modules of transformers, which compute each packed sequence apart.

On the CPU they do so in padded buckets (`recurrence`). On a GPU the convolution and the recurrence of
flash-linear-attention take the borders of sequences: one call computes the whole row.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from millrace.fsdp2.architectures import GATED_DELTA
from millrace.lora import RECURRENT
from services.trainer.backends import recurrence
from services.trainer.backends.recurrence import Segments

OF_TRANSFORMERS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
"""Functions of a modeling file that take a kernel of another package if that is installed."""
CONVOLUTION, BORDERS = "causal_conv1d_fn", "_millrace_borders"


def layers(module: nn.Module) -> list[nn.Module]:
    """The GatedDeltaNet layers of a model whose packed results were shown to be right; none of any other model."""
    config = getattr(module, "config", None)
    if config is None or config.get_text_config().model_type not in GATED_DELTA:
        return []
    return [part for part in module.modules() if type(part).__name__.endswith(RECURRENT)]


def install(module: nn.Module) -> bool:
    """Makes every such layer take the keyword `segments` and compute each sequence apart. Answers whether there is
    one."""
    found: list[Any] = layers(module)
    for layer in found:
        file = importlib.import_module(type(layer).__module__)
        layer.forward = functools.partial(_apart, file, layer.forward)
        setattr(file, CONVOLUTION, _with_borders(getattr(file, CONVOLUTION)))
    return bool(found)


def _apart(
    file: ModuleType, whole: Callable[..., Tensor], hidden_states: Tensor, *, segments: Segments, **unused: Any
) -> Tensor:
    """[1, P, H] → [1, P, H]. `whole` is the forward pass of a layer of this modeling file for rows of one sequence
    each."""
    if hasattr(getattr(file, CONVOLUTION), BORDERS) and hidden_states.is_cuda:
        return whole(hidden_states, cu_seq_lens_q=segments.starts)
    return segments.computed(whole, hidden_states[0])[None]


def _with_borders(of_transformers: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A modeling file's function of the convolution [n, C, P], which flash-linear-attention computes if it is told the
    borders of sequences."""
    if hasattr(of_transformers, BORDERS):
        return of_transformers

    @functools.wraps(of_transformers)
    def convolve(row: Tensor, weight: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor:
        starts = named.get("cu_seq_lens_q")
        if starts is None:
            return of_transformers(row, weight, bias, **named)
        kernel = importlib.import_module(f"{recurrence.KERNELS}.modules.causal_conv1d").causal_conv1d
        found, _ = kernel(row.transpose(1, 2), weight, bias, activation=named["activation"], cu_seqlens=starts)
        convolved: Tensor = found.transpose(1, 2)
        return convolved

    setattr(convolve, BORDERS, True)
    return convolve


def check_kernels(module: nn.Module, device_type: str, path: str, field: str) -> None:
    """Raises InvalidJob if a GPU would compute these layers without a kernel."""
    if layers(module):
        recurrence.check_kernels(device_type, path, field)


@contextmanager
def in_torch(module: nn.Module) -> Iterator[None]:
    """Inside, such layers compute with plain torch, on a host that has kernels for GPUs too."""
    files = [importlib.import_module(name) for name in {type(layer).__module__ for layer in layers(module)}]
    kept = {(file, name): getattr(file, name) for file in files for name in OF_TRANSFORMERS}
    for (file, name), function in kept.items():
        setattr(file, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for (file, name), function in kept.items():
            setattr(file, name, function)
