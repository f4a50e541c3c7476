"""Layers of GatedDeltaNet in modules of transformers, which compute each packed sequence apart.

On the CPU they do so in padded buckets (`recurrence`). On a GPU the convolution and the recurrence of
flash-linear-attention take the borders of sequences: one call computes the whole row. Without buckets, which change in
number, one compilation serves all layers and micro-batches. The recurrence is outside the compiled graphs.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from millrace.fsdp2.architectures import GATED_DELTA
from millrace.lora import RECURRENT
from services.trainer.backends import recurrence
from services.trainer.backends.recurrence import Segments

OF_TRANSFORMERS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
"""Functions of a modeling file that take a kernel of another package if that is installed."""
CONVOLUTION, BORDERS = "causal_conv1d_fn", "_millrace_borders"
COMPILED: Literal["kernel", "torch"] | None = None
"""How decoder layers that contain such layers are compiled on a GPU. kernel: flash-linear-attention computes the
convolution, outside the graphs. torch: the convolution is in a graph, fused with what is around it. None: they are not
compiled."""


def layers(module: nn.Module) -> list[nn.Module]:
    """The GatedDeltaNet layers of a model whose packed results were shown to be right; none of any other model."""
    config = getattr(module, "config", None)
    if config is None or config.get_text_config().model_type not in GATED_DELTA:
        return []
    return [part for part in module.modules() if type(part).__name__.endswith(RECURRENT)]


def install(module: nn.Module) -> list[nn.Module]:
    """Makes every such layer take the keywords `segments`, or those of `row_inputs`, and compute each sequence apart.
    Returns these layers."""
    found: list[Any] = layers(module)
    for layer in found:
        file = importlib.import_module(type(layer).__module__)
        layer.forward = functools.partial(_apart, file, layer.forward)
        setattr(file, CONVOLUTION, _with_borders(getattr(file, CONVOLUTION)))
    return found


def takes_rows(found: Sequence[nn.Module], device: torch.device) -> bool:
    """Whether these installed layers compute a whole packed row at once on this device, with the inputs of
    `row_inputs`. Otherwise they take `segments`."""
    files = {importlib.import_module(type(layer).__module__) for layer in found}
    has_kernels = all(hasattr(getattr(file, CONVOLUTION), BORDERS) for file in files)
    return COMPILED is not None and device.type == "cuda" and has_kernels


def row_inputs(starts: Tensor, places_t: Tensor) -> dict[str, Tensor]:
    """Keywords of a packed row. starts: see `MicroBatch.starts`; places_t: positions in their sequences; both on the
    layers' device."""
    # Otherwise a graph is compiled for this very number of sequences if a tensor beside it has the same size.
    torch._dynamo.mark_dynamic(starts, 0)
    return {"borders": starts, "places": places_t}


def _apart(
    file: ModuleType,
    whole: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    segments: Segments | None = None,
    borders: Tensor | None = None,
    places: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """[1, P, H] → [1, P, H]. `whole` is the forward pass of a layer of this modeling file for rows of one sequence
    each. Raises TypeError if it is told neither `segments` nor `borders`."""
    if borders is not None:
        return whole(hidden_states, cu_seq_lens_q=borders, places=places)
    if segments is None:
        raise TypeError("a recurrent layer needs `segments` or `borders`: without them it would mix sequences")
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
        row_pc, activation = row[0].t(), named["activation"]
        if COMPILED == "torch" and torch.compiler.is_compiling():
            return _convolution(row_pc, weight, bias, activation, named["places"]).t()[None]
        convolved_pc: Tensor = _kernel(row_pc, weight, bias, activation, starts)
        return convolved_pc.t()[None]

    setattr(convolve, BORDERS, True)
    return convolve


def _convolution(row_pc: Tensor, weight: Tensor, bias: Tensor | None, activation: str, places_p: Tensor) -> Tensor:
    """The convolution [P, C] → [P, C] in operations that a compiler fuses with those around them: a sum of shifted
    rows, without those of the sequence before. Sums are in float32, as in the kernel."""
    weight_cw = weight.float()
    found = row_pc.float() * weight_cw[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(row_pc, (0, 0, back, 0))[: len(row_pc)].float()
        found = found + torch.where((places_p >= back)[:, None], earlier, 0.0) * weight_cw[:, -1 - back]
    if bias is not None:
        found = found + bias.float()
    activated: Tensor = ACT2FN[activation](found)
    return activated.to(row_pc.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _kernel(row_pc: Tensor, weight: Tensor, bias: Tensor | None, activation: str, starts: Tensor) -> Tensor:
    """The same by flash-linear-attention. Functions behind its own are excluded from the compiler one by one, so the
    whole is."""
    kernel = importlib.import_module(f"{recurrence.KERNELS}.modules.causal_conv1d").causal_conv1d
    convolved: Tensor = kernel(row_pc[None], weight, bias, activation=activation, cu_seqlens=starts)[0]
    return convolved[0]


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
