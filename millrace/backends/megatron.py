"""Megatron-Core: tensor, pipeline, context and expert parallelism. The backend is in
`services/trainer/backends/megatron`.

verl's words for the same options: TP, PP, EP and so on are the sizes here, LAST_LAYER is `last_stage_layers`,
OFFLOAD_FRACTION is `optimizer_offload_fraction`.
"""

import functools
from collections.abc import Mapping
from math import lcm
from typing import Any, Literal

from pydantic import Field

from millrace.descriptors import BackendDescriptor
from millrace.software import TESTED_TORCH, Software
from millrace.validation.fields import StrictModel
from millrace.validation.limits import LARGEST_WEIGHT, MOST_RANKS
from millrace.validation.mistakes import options

TESTED_MEGATRON = ("0.16.1", "0.19.2")
"""Releases of megatron-core. 0.19 needs Python 3.12, and was not run on GPUs."""
TESTED_DEEPEP = "1.2.1"
"""The last release whose `Buffer` Megatron-Core calls."""


@functools.cache
def deepep_obstacle() -> str | None:
    """Why DeepEP cannot be used in this process; None if it can. Imports torch, and DeepEP if there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability()[0] < 9:
        return "its kernels need a Hopper GPU or a newer one"
    try:
        from deep_ep import Buffer  # noqa: F401
        from deep_ep.utils import EventHandle, EventOverlap  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "deep_ep":
            return "deep_ep is not installed"
        return f"deep_ep cannot be loaded: {error}"
    except ImportError as error:  # built for another torch, or another package of that name
        return f"deep_ep cannot be loaded: {error}"
    return None


MOST_LAYERS = 10_000
RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class Recompute(StrictModel):
    """Activations that are computed again in the backward pass instead of being kept."""

    granularity: Literal["none", "selective", "full"] = "none"
    """selective: the named `modules` of every layer; full: whole layers."""
    modules: tuple[RecomputeModule, ...] = Field(("core_attn",), examples=[["core_attn"]])
    method: Literal["uniform", "block"] = "uniform"
    """full only. uniform: every layer, in units of `layers`; block: the first `layers` layers of each stage."""
    layers: int = Field(1, ge=1, le=MOST_LAYERS)


class Experts(StrictModel):
    """Mixture-of-experts layers."""

    dispatcher: Literal["auto", "alltoall", "deepep"] = "auto"
    """auto: DeepEP if it is installed, works with this GPU and expert_parallel stays within a host, else
    alltoall."""
    load_balancing: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """An auxiliary loss pulls the router away from what the reward asks for, so it is off unless asked for."""
    aux_loss_coefficient: float = Field(0.0, ge=0.0, le=LARGEST_WEIGHT)
    bias_update_rate: float = Field(0.0, ge=0.0, le=1.0)
    """DeepSeek-V3's balancing bias; 0 keeps the one that was loaded."""
    train_router: bool = True

    @property
    def needs_whole_batch(self) -> str:
        """See `BackendDescriptor.needs_whole_batch`. Megatron averages the auxiliary loss over the micro-batches of a
        pass, and not over tokens as the other losses."""
        if self.load_balancing == "none":
            return ""
        return f"trainer.backend_options.experts.load_balancing: {self.load_balancing} is averaged over micro-batches"


class MegatronOptions(StrictModel):
    """What `trainer.backend_options` may hold for this backend."""

    tensor_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    sequence_parallel: bool = True
    """Split norms and residuals over the tensor-parallel ranks by tokens. Without effect at tensor_parallel 1."""
    pipeline_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    virtual_pipeline: int = Field(1, ge=1, le=MOST_RANKS)
    """Model chunks on each pipeline stage (the interleaved schedule)."""
    first_stage_layers: int | None = Field(None, ge=1, le=MOST_LAYERS)
    last_stage_layers: int | None = Field(None, ge=1, le=MOST_LAYERS)
    """Layers on the first and the last stage if they differ from the others, which share the rest evenly."""
    context_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    expert_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    expert_tensor_parallel: int | None = Field(None, ge=1, le=MOST_RANKS)
    """Tensor parallelism inside an expert; null: as tensor_parallel."""
    distributed_optimizer: bool = True
    """Split optimizer state over the data-parallel ranks."""
    fused_gradients: bool = True
    """On GPUs, matrix products add weight gradients to the float32 buffers themselves."""
    recompute: Recompute = Field(Recompute(), examples=[{"granularity": "full"}])
    experts: Experts = Field(Experts(), examples=[{"dispatcher": "auto"}])
    optimizer_offload_fraction: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the optimizer's state that lives and is updated in host memory."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory between updates; with `optimizer_offload_fraction` the rest of it."""
    offload_parameters: bool = False
    """Keep the weights in host memory, and no memory for gradients, except while the model computes or is published."""
    release_gradients: bool = False
    """Hold memory for gradients only from a backward pass to its update."""
    optimizer_moments: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: as DeepSeek-V3 was trained (arXiv 2412.19437, 3.3.2); weights stay float32. On GPUs only."""
    offload_reference: bool = False
    """Keep the reference policy in host memory between uses."""
    logprob_chunk_tokens: int = Field(1024, ge=16, le=1 << 20)
    """Tokens whose logits exist at the same time."""

    @property
    def needs_whole_batch(self) -> str:
        """See `BackendDescriptor.needs_whole_batch`."""
        if self.frees_gradients:
            name = "release_gradients" if self.release_gradients else "offload_parameters"
            return f"trainer.backend_options.{name}: gradients would be held while the trainer waits for groups"
        return self.experts.needs_whole_batch

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients have memory only from a backward pass to its update."""
        return self.release_gradients or self.offload_parameters

    @property
    def splits_sequence(self) -> bool:
        """Whether norms and residuals are split over the tensor-parallel ranks."""
        return self.sequence_parallel and self.tensor_parallel > 1

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share one expert."""
        return self.expert_tensor_parallel or self.tensor_parallel

    @property
    def ranks_of_a_model(self) -> int:
        """Ranks that hold one copy of the layers other than experts."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def ranks_of_all_experts(self) -> int:
        """Ranks that hold one copy of all experts."""
        return self.expert_tensor_size * self.expert_parallel * self.pipeline_parallel

    @property
    def ranks_multiple(self) -> int:
        """The number of ranks has to be a multiple of this."""
        return lcm(self.ranks_of_a_model, self.ranks_of_all_experts)


def parse(backend_options: Mapping[str, Any]) -> MegatronOptions:
    """The checked options. Raises InvalidJob with every mistake."""
    return options(MegatronOptions, backend_options, "trainer.backend_options")


DESCRIPTOR = BackendDescriptor(
    software=Software(
        title="Megatron-Core",
        distributions=("megatron-core",),
        imports=("megatron.core",),
        extras=("cpu-megatron", "gpu-megatron"),
        also_shown=("torch",),
        tested={"megatron-core": TESTED_MEGATRON, "torch": TESTED_TORCH},
    ),
    build="services.trainer.backends.megatron.build:build",
    options=MegatronOptions,
    ranks_multiple=lambda options: options.ranks_multiple,
    needs_whole_batch=lambda options: options.needs_whole_batch,
    check="millrace.megatron.rules:check_submission",
    across_hosts="millrace.megatron.rules:across_hosts",
    memory="millrace.memory.megatron:predict",
    role_options={
        "reference": frozenset({"offload_reference", "logprob_chunk_tokens"}),
        "critic": frozenset(
            {
                *("recompute", "optimizer_offload_fraction", "offload_optimizer", "offload_parameters"),
                *("release_gradients", "optimizer_moments"),
            }
        ),
    },
    takes_images=True,
    replays_experts=True,
    trains_adapters=True,
    publishes_adapters=True,
    page="docs/megatron.md#options",
)
