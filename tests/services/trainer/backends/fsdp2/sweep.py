"""Every causal language model of the installed transformers against the gate of the backend: `python -m
tests.services.trainer.backends.fsdp2.sweep [MODEL_TYPE ...]` prints one JSON object for each."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from millrace.errors import InvalidJob
from services.rollout.engines.transformers.decode_batch import DecodeBatch
from services.rollout.engines.transformers.model import attention_for
from services.trainer.backends.fsdp2.attention import FLASH2, SEGMENTS
from services.trainer.backends.fsdp2.computable import check_computable
from services.trainer.backends.fsdp2.proof.packed import CANNOT_RUN, FIRST_TOKEN, build, random_model
from services.trainer.backends.fsdp2.proof.tiny import VOCABULARY, set_noise, tiny

OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "minimax_m3_vl_text": {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "reformer": {"is_decoder": True},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1},
}
"""Entries without a default with which the model can be built, and those that published models have."""
DECODED = 6
"""Tokens of each sequence that the engine gets one after the other."""
IMPLEMENTATIONS = (SEGMENTS, FLASH2, "sdpa")


@dataclass(frozen=True)
class Row:
    """What the gate says of an architecture with the default entries of its config."""

    model_type: str
    name: str
    """Of the class."""
    refused: dict[str, str]
    """Reason by attention implementation; an accepted one has none."""
    engine_nats: float | None = None
    """Largest difference of a log-probability to the transformers engine, which decodes with a cache; None where the
    architecture is refused."""


def registry() -> Iterator[type]:
    """The config classes that have a causal language model."""
    return iter(AutoModelForCausalLM._model_mapping)


def _unfilled(config: Any) -> Any:
    """The model without values: a tiny one, or one of its own size where its sizes do not become small together."""
    set_noise(config, 0.0)
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(tiny(config))
        except CANNOT_RUN:
            return AutoModelForCausalLM.from_config(config)


def look(made: Any) -> Row:
    """The gate's answers for a config class."""
    kind: Any = AutoModelForCausalLM._model_mapping[made]
    try:
        module = _unfilled(made(**OPTIONS.get(made.model_type, {})))
    except CANNOT_RUN as error:
        told = f"cannot be built small: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Row(made.model_type, kind.__name__, dict.fromkeys(IMPLEMENTATIONS, told))
    refused = {}
    for implementation in IMPLEMENTATIONS:
        try:
            check_computable(module, implementation, made.model_type, "model.path")
        except InvalidJob as error:
            refused[implementation] = error.mistakes[0].reason
    accepted = len(refused) < len(IMPLEMENTATIONS)
    return Row(made.model_type, kind.__name__, refused, engine_nats(module) if accepted else None)


def engine_nats(module: Any) -> float:
    """Decodes sequences of many lengths beside each other as the transformers engine does, and compares with each
    alone."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        alone = random_model(type(module), module.config, "eager").eval()
        chosen = attention_for(module.config, "sdpa" if module._supports_sdpa else "eager")
        engine = build(type(module), module.config, chosen).eval()
    engine.load_state_dict(alone.state_dict())
    rows = [torch.randint(FIRST_TOKEN, VOCABULARY, (length,)).tolist() for length in (15, 30, 22)]
    batch, prompts = DecodeBatch(engine), [row[: len(row) - DECODED] for row in rows]
    found = [batch.add(prompts)]
    found += [batch.step([row[len(row) - DECODED + step] for row in rows]) for step in range(DECODED - 1)]
    with torch.no_grad():
        whole = [alone(input_ids=torch.tensor([row]), use_cache=False).logits[0, -DECODED - 1 : -1] for row in rows]
    apart = torch.stack(found, 1).log_softmax(-1) - torch.stack(whole).log_softmax(-1)
    return float(apart.abs().nan_to_num(nan=float("inf")).max())


if __name__ == "__main__":
    for made in registry():
        if not sys.argv[1:] or made.model_type in sys.argv[1:]:  # type: ignore[attr-defined]
            print(json.dumps(asdict(look(made))), flush=True)
