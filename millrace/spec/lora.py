"""Adapters that are trained in place of the model's own weights."""

from typing import Annotated, Literal

from pydantic import Field

from millrace.validation.fields import StrictModel

MEGATRON_NAMES: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
"""Megatron's names of layers, and those that the layers in them have in a model folder."""
OF_EXPERTS = {"linear_fc1": ("gate", "up"), "linear_fc2": ("down",)}
"""Megatron's names that mean layers of each routed expert too, and which of them."""
ROUTERS = frozenset({"router", "gate", "shared_expert_gate"})
"""Names of modules that decide which experts a token is sent to, or how much the shared experts add."""
ModuleName = Annotated[str, Field(min_length=1, max_length=256)]


class Lora(StrictModel):
    rank: int = Field(32, ge=1, le=4096)
    """Rank of the adapters. Ranks under 32 learn more slowly."""
    alpha: float = Field(32.0, gt=0.0, le=1e6)
    """The adapter's output is scaled by alpha/rank."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the adapter's inputs that an update sets to zero."""
    target_modules: Literal["all-linear"] | list[ModuleName] = Field("all-linear", examples=[["q_proj", "v_proj"]])
    """Names of the layers that get an adapter, or the ends of their names; Megatron's names of fused layers, such as
    linear_qkv, mean the layers in them, and with the megatron backend linear_fc1 and linear_fc2 those of routed experts
    too. One of Megatron's names that this model has no layer for is reported and skipped. all-linear: every linear
    layer except the model's head and the routers of experts."""
    exclude_modules: list[ModuleName] = Field(default_factory=list, examples=[["down_proj"]])
    """Layers among them that get none."""
    init: Literal["kaiming", "gaussian", "xavier"] = "kaiming"
    """First values of the matrix A: PEFT's two, or normal ones of variance 2/(inputs + rank) (xavier). B
    begins with zeros, so that the model begins as it is in its folder."""
    dora: bool = False
    """Whether direction and magnitude of a weight are trained apart (DoRA, arXiv 2402.09353)."""
    rslora: bool = False
    """Whether the scale is alpha/√rank (arXiv 2312.03732)."""
    adapter_path: str | None = None
    """Absolute path of a PEFT folder whose adapter is trained further, the same for every service. Its rank, alpha,
    layers, dora and rslora take the place of the options above; only `dropout` is the job's."""
    merge: bool = False
    """Whether replicas get whole weights with the adapter merged into them. false: a replica gets the model's own
    weights once, and after each step the adapter alone. true is needed for DoRA, and for layers to which an engine can
    add no adapter."""


def folder_names(names: list[str]) -> list[str]:
    """The names that layers have in a model folder, if some are Megatron's."""
    return [found for name in names for found in MEGATRON_NAMES.get(name, (name,))]


def is_router(layer: str) -> bool:
    """Whether the layer of this name is a router of experts, or part of one. Routers never have an adapter."""
    return not ROUTERS.isdisjoint(layer.split("."))
