"""Replacements of functions of megatron-core 0.16 and 0.19 that do not work on a host without CUDA."""

import functools
from collections.abc import Callable
from typing import Any

import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.tensor_parallel.random as random
import megatron.core.transformer.moe.moe_utils as moe
import megatron.core.transformer.moe.token_dispatcher as dispatcher
import megatron.core.transformer.multi_latent_attention as latent
import torch

from services.trainer.backends.megatron.model.layers import WholeLinear


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
