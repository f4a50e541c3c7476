"""What every process of vLLM runs before a model is built: the entry point `vllm.general_plugins` of this package.

vLLM's CPU build packs the weights of linear layers for its kernels and drops the originals. Weights that are published
later then have nowhere to go, and a tied output layer keeps a stale packed copy, silently. Here the layers keep their
parameters and compute with torch's own linear, at a cost of 10 to 30 % of the speed.
"""

import os
from typing import Any

from services.rollout.lifeline import REPLICA_PID, hold_on


def install() -> None:
    """Ties the process to its replica; on the CPU build also keeps linear weights loadable. Does nothing in a vLLM
    that no replica started."""
    if REPLICA_PID not in os.environ:
        return
    hold_on()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = _keep_weight  # type: ignore[assignment]


def _keep_weight(layer: Any, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear
