"""Replacements of calls in torch and in megatron-core 0.16 and 0.19 that do not work on a host without CUDA.

megatron-core calls CUDA where it does not have to: it asks for the current device, creates small tensors on "cuda",
orders streams, keeps CUDA's random state and compares `Tensor.type()` with CUDA's names. `install` replaces these calls
by calls that use the host, for the whole process, before megatron is imported; `patch_megatron` replaces functions of
megatron itself afterwards. So the backend that runs on GPUs is the one that is tested without. Transformer Engine has
no replacement: `model/layers` builds Megatron's own layers.

Other users of torch.cuda in the same process would get wrong answers. `torch.cuda.is_available()` stays False.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

HOST = torch.device("cpu")


class _Stream:
    """A stream or an event on a host, where everything runs in the order in which it is called."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None: ...

    def record_event(self, *args: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True

    def _nothing(self, *args: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = _nothing


@functools.cache
def install() -> None:
    """Replaces the calls. To be called before megatron is imported; does nothing with CUDA and nothing the second
    time."""
    if torch.cuda.is_available():
        return
    # The first use of a device context notes which functions create tensors. It has to note torch's own, which the
    # replacements call: if it notes the replacements, nothing is created on the meta device any more.
    with torch.device("meta"):
        torch.empty(0)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: HOST
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.Stream = cuda.Event = _Stream
    stream = _Stream()
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **options: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
        module.manual_seed = torch.manual_seed
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(torch, name, _on_host(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **options: self
    tensor.record_stream = lambda self, *args: None
    tensor.type = _named_as_cuda(tensor.type)
    functions: Any = torch
    functions.compile = _uncompiled  # megatron compiles small functions, which takes longer here than running them


def _uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replaces torch.compile, as a function and as a decorator."""
    return function if function is not None else lambda decorated: decorated


def _on_host(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function `create`, in which device="cuda" means the host."""

    @functools.wraps(create)
    def created(*args: Any, **options: Any) -> torch.Tensor:
        if "cuda" in str(options.get("device")):
            options["device"] = HOST
        return create(*args, **options)

    return created


def _named_as_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces Tensor.type: the optimizer accepts parameters whose type() is torch.cuda.FloatTensor or
    torch.cuda.BFloat16Tensor."""

    def named(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if args or options:
            return type_of(self, *args, **options)
        return type_of(self).replace("torch.", "torch.cuda.", 1)

    return named


@functools.cache
def patch_megatron() -> None:
    """Replaces functions of megatron-core; does nothing with CUDA.

    Without Transformer Engine some names are missing. Split sizes have to be numbers instead of tensors. Gloo does not
    gather parts of different sizes. The random state would be queued until CUDA is initialized. Latent attention uses
    Transformer Engine's linear layer for its down-projections: with Megatron's own, which is split over ranks, the
    gradient of the rotary keys is wrong.
    """
    if torch.cuda.is_available():
        return
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.core.transformer.multi_latent_attention as latent

    from services.trainer.backends.megatron.model.layers import WholeLinear

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    latent.HAVE_TE, latent.TELinear = False, WholeLinear
    moe.te_general_gemm = None
    moe.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = on_host
    mappings._gather_along_first_dim = _unequal_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _unequal_reduce_scatter(mappings._reduce_scatter_along_first_dim)
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)


def _unequal_gather(equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function `equal`, extended to parts of different sizes."""

    def gather(part: torch.Tensor, group: Any, sizes: list[int] | None = None, buffer: bool = False) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return equal(part, group, None, buffer)
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def _unequal_reduce_scatter(equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function `equal`, extended to parts of different sizes."""

    def scatter(whole: torch.Tensor, group: Any, sizes: list[int] | None = None, buffer: bool = False) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return equal(whole, group, None, buffer)
        total = whole.clone()
        torch.distributed.all_reduce(total, group=group)
        rank: int = group.rank()
        own: torch.Tensor = total.split(sizes)[rank]
        return own.contiguous()

    return scatter
