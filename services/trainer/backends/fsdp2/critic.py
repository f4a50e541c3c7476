"""The critic: the decoder of a Hugging Face model with one number a token in place of the logits."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel

from millrace.errors import refused
from millrace.spec import JobSpec
from millrace.spec.model import Model
from millrace.weights.manifest import TensorInfo
from services.trainer.backends import ValueLossFn
from services.trainer.backends.fsdp2 import export
from services.trainer.backends.fsdp2.attention import packing
from services.trainer.backends.fsdp2.model import Sharding, load_config, read_whole, sharded
from services.trainer.backends.fsdp2.trained import Sharded
from services.trainer.microbatch import MicroBatch

FIELD = "algorithm.critic.path"
HEAD = ("score.weight", "score.bias")
"""What transformers calls the head of a model for token or sequence classification."""


class ValueModel(nn.Module):
    """`model`, the decoder, and `score`, a linear head of one output."""

    def __init__(self, config: Any, *, dtype: torch.dtype, attention: str, trust_remote_code: bool) -> None:
        super().__init__()
        self.model = AutoModel.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
        self.score = nn.Linear(config.get_text_config().hidden_size, 1, dtype=dtype)

    def forward(self, positions_r: Tensor, **inputs: Any) -> Tensor:
        """float32 [R], at the chosen positions of one packed row."""
        hidden_rh = self.model(use_cache=False, **inputs).last_hidden_state[0, positions_r]
        return self.score(hidden_rh).float().sum(dim=-1)  # of one: FSDP wants no view


class Critic(Sharded):
    """See `services.trainer.backends.Critic`."""

    def __init__(self, spec: JobSpec, sharding: Sharding, vocabulary: int) -> None:
        chosen = spec.algorithm.critic
        assert chosen is not None
        source = spec.model.model_copy(update={"path": chosen.path or spec.model.path})
        config = load_config(source, FIELD)
        if (size := config.get_text_config().vocab_size) != vocabulary:
            reason = f"it knows {size} tokens and the policy {vocabulary}"
            raise refused(FIELD, source.path, reason, "give a model with the policy's tokenizer.")

        def build() -> nn.Module:
            trust = source.trust_remote_code
            return ValueModel(config, dtype=torch.float32, attention=sharding.attention, trust_remote_code=trust)

        module: Any = sharded(build, lambda: _read(source, config), sharding)
        if spec.trainer.activation_recompute:
            module.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.folder = Path(source.path)
        self.config = {
            "architectures": [name.replace("ForCausalLM", "ForTokenClassification") for name in config.architectures],
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
            "tie_word_embeddings": False,
        }
        self._attention, self._rank = sharding.attention, sharding.mesh.get_rank()
        super().__init__(module, chosen.optimizer, torch.device(sharding.mesh.device_type))

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            values = [self._values(batch) for batch in microbatches]
        self._model.reshard()  # the root waits for a backward pass, which does not come
        return values

    def forward_backward(self, microbatches: Sequence[MicroBatch], loss_fn: ValueLossFn) -> list[Any]:
        outputs = []
        for batch in microbatches:
            loss, output = loss_fn(batch, self._values(batch))
            loss.backward()
            outputs.append(output)
        return outputs

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        for part in ("model", "score"):
            for info, tensor in export.export(getattr(self._model, part), dtype, self._rank):
                yield replace(info, name=f"{part}.{info.name}"), tensor

    def _values(self, batch: MicroBatch) -> Tensor:
        values_r: Tensor = self._model(
            batch.predicting_r.to(self._device),
            input_ids=batch.tokens_p[None].to(self._device),
            position_ids=batch.positions_p[None].to(self._device),
            **packing(self._attention, batch, self._device),
        )
        return values_r


def _read(source: Model, config: Any) -> dict[str, Tensor]:
    """The decoder as transformers loads it, and the folder's own head or zeros: before it has learnt, it expects 0."""
    decoder = {f"model.{name}": tensor for name, tensor in read_whole(AutoModel, source, config, FIELD).items()}
    hidden = config.get_text_config().hidden_size
    head = {"score.weight": torch.zeros(1, hidden), "score.bias": torch.zeros(1)}
    for name, tensor in _stored_head(Path(source.path)).items():
        if tensor.shape != head[name].shape:
            reason = f"its {name} is {tuple(tensor.shape)}, not {tuple(head[name].shape)}: a critic says one number"
            raise refused(FIELD, source.path, reason, "give a model with one label, or one without a head.")
        head[name] = tensor
    return decoder | head


def _stored_head(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in _files(folder):
        with safe_open(file, "pt") as tensors:
            stored = set(tensors.keys())
            found |= {name: tensors.get_tensor(name) for name in HEAD if name in stored}
    return found


def _files(folder: Path) -> set[Path]:
    """Those that may hold a part of the head."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return set(folder.glob("*.safetensors"))
    files = json.loads(index.read_text())["weight_map"]
    return {folder / files[name] for name in HEAD if name in files}
