"""mbridge's mapping between Hugging Face and Megatron, to hold ours against."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mbridge.core.parallel_states import ParallelStates
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from millrace.backends.megatron import MegatronOptions
from millrace.megatron.architectures import read_shape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import TRANSFORMER_ENGINE, layout
from services.trainer.backends.megatron.published import read

BRIDGES = {
    "qwen3": ("qwen3", "Qwen3Bridge"),
    "qwen3_moe": ("qwen3moe", "Qwen3MoEBridge"),
    "mixtral": ("mixtral", "MixtralBridge"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Bridge"),
    "moonlight": ("deepseek_v3", "DeepseekV3Bridge"),
    # Last: a tied model changes the mapping of every later one.
    "qwen2": ("qwen2", "Qwen2Bridge"),
}


def disagreements(kind: str, folder: Path, tensor_parallel: int) -> dict[str, Any]:
    """How many parameters of Transformer Engine's layers both maps tell alike, and the names of those they do not."""
    shape = read_shape(folder)
    topology = Topology(tensor_parallel, MegatronOptions(tensor_parallel=tensor_parallel))
    layouts = [layout(shape, topology, rank, TRANSFORMER_ENGINE)[0] for rank in range(tensor_parallel)]
    ours = [dict(read(folder, placements, torch.float32)) for placements in layouts]
    bridge, stored = _bridge(kind, folder, tensor_parallel), load_file(folder / "model.safetensors")
    bridge.vocab_size, bridge.padded_vocab_size = shape.vocabulary, shape.padded_vocabulary(tensor_parallel)
    agreed, unknown, different = 0, [], []
    for name, placement in layouts[0].items():
        try:
            names = bridge._weight_name_mapping_mcore_to_hf(name)
        except NotImplementedError:  # it knows no dense layer among layers with experts
            unknown.append(name)
            continue
        fused: Tensor = bridge._weight_to_mcore_format(name, [stored[part] for part in names])
        parts = bridge._weight_split_across_tp(name, fused, ours[0][name], tensor_parallel)
        same_names = set(names) == {piece.tensor.name for piece in placement.pieces}
        same_values = all(torch.equal(part, mine[name]) for part, mine in zip(parts, ours, strict=True))
        agreed += same_names and same_values
        if not (same_names and same_values):
            different.append(name)
    return {"agreed": agreed, "unknown": unknown, "different": different}


def _bridge(kind: str, folder: Path, tensor_parallel: int) -> Any:
    module, name = BRIDGES[kind]
    config = AutoConfig.from_pretrained(folder)
    # What mbridge reads was renamed in transformers 5.
    config.rope_theta, config.rope_scaling = config.rope_parameters["rope_theta"], None
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parallel = {f"{what}_{of}": 1 if of == "size" else 0 for what in ("pp", "cp", "ep") for of in ("size", "rank")}
    groups = dict.fromkeys(("tp_group", "pp_group", "cp_group", "ep_group", "etp_group", "vpp_size"))
    tensor = {"tp_size": tensor_parallel, "tp_rank": 0, "etp_size": tensor_parallel, "etp_rank": 0}
    multiple = 16 * tensor_parallel
    build = getattr(import_module(f"mbridge.models.{module}"), name)
    # Its configuration is of an older megatron-core for some models; the mapping does without.
    build = type(name, (build,), {"_build_config": lambda self: SimpleNamespace(gated_linear_unit=True)})
    states = ParallelStates(**tensor, **parallel, **groups)
    return build(config, torch.float32, states, make_vocab_size_divisible_by=multiple)
