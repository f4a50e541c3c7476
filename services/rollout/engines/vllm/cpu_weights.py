"""The entry point `vllm.general_plugins` of this package: every process of vLLM runs it before it builds a model.

vLLM's CPU build packs the weights of linear layers and of experts for its kernels and drops the originals. Weights
that are published later would have no parameter to be written to, and a tied output layer would keep an old packed copy
without an error. With this plugin the layers keep their parameters and compute with torch's own linear, at a cost of 10
to 30 % of the speed.

The build also lacks two exchanges between processes that experts over data-parallel ranks need.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from services.rollout.engines.lifeline import REPLICA_PID, hold_on
from services.rollout.engines.vllm import cpu_recurrence

BY_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
BY_PILLOW = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
OF_PROMPTS = {
    "Qwen2_5_VLProcessor": "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "Qwen3VLProcessor": "transformers.models.qwen3_vl.processing_qwen3_vl",
}
"""Processors of prompts with images and videos, and their modules."""
SPECIAL = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
"""Tokens of images and videos, by the names of the attributes that such processors have."""


def install() -> None:
    """Ends the process with its replica, and on the CPU build keeps parameters as they are loaded. Does nothing in a
    vLLM that no replica started."""
    if REPLICA_PID not in os.environ:
        return
    hold_on()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        utils: Any = import_module("vllm.model_executor.layers.utils")
        utils.dispatch_cpu_unquantized_gemm = _keep_weight
        cpu_recurrence.install()
        read_images_without_torchvision()
        if (kernel := experts_kernel()) is not None:
            kernel.process_weights_after_loading = _keep_experts
            kernel.apply = _compute_experts
            method: Any = import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
            method.select_unquantized_moe_backend = partial(_choose_kernel, method.select_unquantized_moe_backend)
        communicator: Any = import_module("vllm.distributed.device_communicators.cpu_communicator").CpuCommunicator
        communicator.all_gatherv, communicator.reduce_scatterv = _all_gatherv, _reduce_scatterv


def read_images_without_torchvision() -> None:
    """If torchvision is not installed: puts transformers' processor of images by Pillow in the place of the one that
    needs it, which vLLM's module of Qwen3.5 imports also for the language model alone, and takes the processor of
    videos, which needs it too, out of those of `OF_PROMPTS`. Idempotent. The replica's own process calls it too: vLLM
    runs plugins once a process, which may have been before the process became a replica."""
    if find_spec("torchvision") is None and find_spec(BY_PILLOW) is not None:
        sys.modules.setdefault(BY_TORCHVISION, import_module(BY_PILLOW))
        for name, place in OF_PROMPTS.items():
            getattr(import_module(place), name).__init__ = _without_videos


def _without_videos(
    processor: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **unused: Any
) -> None:
    """The constructor of such a processor without a processor of videos. Its arguments are the parts that transformers
    loads."""
    for name, token in SPECIAL.items():
        setattr(processor, name, token)
        setattr(processor, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    super(type(processor), processor).__init__(image_processor, tokenizer, chat_template=chat_template)
    processor.video_processor = image_processor  # vLLM reads the names of its options; prompts have no videos


def experts_kernel() -> Any:
    """The class that computes experts on the CPU; None in a release that computes them in another way."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return None
    return CPUUnquantizedExperts


def _keep_weight(layer: Any, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear


def _keep_experts(kernel: Any, layer: Any) -> None:
    kernel._use_zentorch = False


def _choose_kernel(choose: Callable[[Any], Any], moe_config: Any) -> Any:
    """Chooses the kernel of the experts that `moe_config`, vLLM's FusedMoEConfig, describes as for a model without
    adapters. With adapters of any layers vLLM chooses one for GPUs; experts have none here."""
    moe_config.is_lora_enabled = False
    return choose(moe_config)


def _compute_experts(
    kernel: Any,
    *,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    expert_map: Any,
    apply_router_weight_on_input: bool,
    **others: Any,
) -> None:
    """Computes one expert after another, each for the tokens that chose it. Hidden states are [tokens, hidden]; w1 has
    the rows of gate, then those of up."""
    import torch
    from torch.nn.functional import linear
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    sum_th = torch.zeros_like(hidden_states, dtype=torch.float32)
    ids_tk = topk_ids if expert_map is None else expert_map[topk_ids]
    for expert in range(len(w1)):
        token, choice = (ids_tk == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        both = linear(hidden_states[token], w1[expert], None if kernel.w1_bias is None else kernel.w1_bias[expert])
        inner = both.new_empty(len(token), both.shape[1] // 2)
        apply_moe_activation(activation, inner, both)
        found = linear(inner, w2[expert], None if kernel.w2_bias is None else kernel.w2_bias[expert]).float()
        if not apply_router_weight_on_input:
            found *= topk_weights[token, choice].float()[:, None]
        sum_th.index_add_(0, token, found)
    output.copy_(sum_th)


def _all_gatherv(communicator: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """The rows of all ranks of the group, in the order of ranks; of each tensor if `input_` is a list. `sizes`: rows of
    each rank; None if all have as many. Only along dimension 0."""
    import torch

    if isinstance(input_, list):
        return [_all_gatherv(communicator, tensor, dim, sizes) for tensor in input_]
    sizes = sizes or [len(input_)] * communicator.world_size
    # Gloo gathers tensors of one size.
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: len(input_)] = input_
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=communicator.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(communicator: Any, input_: Any, dim: int = -1, sizes: Sequence[int] | None = None) -> Any:
    """This rank's rows of the sum over all ranks of the group. `sizes`: as in `_all_gatherv`."""
    import torch

    sizes = sizes or [len(input_) // communicator.world_size] * communicator.world_size
    rank, summed = communicator.rank_in_group, input_.clone()
    torch.distributed.all_reduce(summed, group=communicator.device_group)
    return summed[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
