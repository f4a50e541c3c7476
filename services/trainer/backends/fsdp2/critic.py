"""The critic: the decoder of a Hugging Face model, with one number per token in place of the logits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from millrace.backends.fsdp2 import Fsdp2Options
from millrace.errors import refused
from millrace.spec import JobSpec
from millrace.weights.plans.manifest import TensorInfo
from services.trainer.backends.fsdp2 import recurrent
from services.trainer.backends.fsdp2.attention import model_inputs
from services.trainer.backends.fsdp2.computable import check_config
from services.trainer.backends.fsdp2.flops import sequence_cost
from services.trainer.backends.fsdp2.loading import LocalPart, ModelFolder
from services.trainer.backends.fsdp2.model import (
    Sharding,
    build_unfilled,
    decoder_layers,
    load_config,
    shard_model,
)
from services.trainer.backends.fsdp2.published import export
from services.trainer.backends.fsdp2.sharded_model import ShardedModel
from services.trainer.checkpoints.model_files import CRITIC_FIELD, config_changes, stored_head
from services.trainer.protocol.backend import Output, ValueLossFn
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives


class ValueModel(nn.Module):
    """`model`, the decoder, and `score`, a linear head of one output."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.score = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, dtype=model.dtype)

    def forward(self, positions_r: Tensor, **inputs: Any) -> Tensor:
        """Values at the chosen positions of one packed row, float32 [R]."""
        hidden_rh = self.model(**inputs).last_hidden_state[0, positions_r]
        values_r: Tensor = self.score(hidden_rh).float().sum(dim=-1)  # a sum of one number: FSDP allows no view
        return values_r


class Fsdp2Critic(ShardedModel):
    """Implements `services.trainer.protocol.backend.Critic`."""

    def __init__(self, spec: JobSpec, sharding: Sharding, options: Fsdp2Options, vocabulary: int) -> None:
        chosen = spec.algorithm.critic
        assert chosen is not None
        source = spec.model
        if chosen.path is not None:
            source = source.model_copy(update={"path": chosen.path, "weights": None})
        with collectives.fail_together():
            config = load_config(source, CRITIC_FIELD)
            check_config(spec, options, config, source.path, CRITIC_FIELD)
            if (size := config.get_text_config().vocab_size) != vocabulary:
                reason = f"it knows {size} tokens and the policy {vocabulary}"
                raise refused(CRITIC_FIELD, source.path, reason, "give a model with the policy's tokenizer.")

        def build() -> ValueModel:
            return ValueModel(
                build_unfilled(AutoModel, source, config, sharding, dtype=torch.float32, field=CRITIC_FIELD)
            )

        folder = ModelFolder(AutoModel, source, config, torch.float32, CRITIC_FIELD)
        module: Any = shard_model(build, folder, sharding, "model", lambda built: _fill_head(built, folder))
        if spec.trainer.activation_recompute:
            module.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.folder = Path(source.path)
        self.cost = sequence_cost(config, module.model, module.score)
        self.config: Mapping[str, object] = config_changes(config.architectures)
        self._attention, self._rank = sharding.attention, sharding.mesh.get_rank()
        self._sequence = sharding.sequence
        self._recurrent = bool(recurrent.layers(module.model))
        device = torch.device(sharding.mesh.device_type)
        super().__init__(
            module,
            chosen.optimizer,
            device,
            offload_optimizer=options.offload_optimizer,
            sums=sharding.sums,
        )
        if options.offload_activations:
            self.offload_activations(decoder_layers(module))

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            values = [self._values(batch) for batch in self._sequence.turns.mine(microbatches)]
        self._model.reshard()  # the root waits for a backward pass, which does not come
        return self._sequence.turns.everyones(values, microbatches)

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], loss_fn: ValueLossFn[Output], *, more: bool = False
    ) -> list[Output]:
        turns, values, outputs = self._sequence.turns, [], []
        for batch in self.with_gradients_added_up(turns.mine(microbatches), more=more):
            values_r = self._values(batch)
            loss, output = loss_fn(batch, values_r)
            loss.backward()
            values.append(values_r.detach())
            outputs.append(output)
        own = iter(outputs)
        scored = enumerate(zip(microbatches, turns.everyones(values, microbatches), strict=True))
        # Other ranks added the gradient of the other micro-batches; the same values give the same output here.
        return [next(own) if turns.is_mine(number) else loss_fn(*each)[1] for number, each in scored]

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        for part in ("model", "score"):
            for info, tensor in export(getattr(self._model, part), dtype, self._rank):
                yield replace(info, name=f"{part}.{info.name}"), tensor

    def _values(self, batch: MicroBatch) -> Tensor:
        tokens = self._sequence.tokens(batch, self._device)
        inputs = model_inputs(self._attention, tokens, self._device, recurrent=self._recurrent)
        values_r: Tensor = self._model(tokens.positions_r, **inputs)
        return self._sequence.whole_scores(values_r[None], tokens)[0]


def _fill_head(module: ValueModel, folder: ModelFolder) -> None:
    """The folder's head, or zeros: an untrained critic predicts 0. Raises InvalidJob."""
    weight = module.score.weight
    stored = stored_head(Path(folder.model.path), weight.shape[1])
    LocalPart.of(weight).copy_from(torch.zeros(weight.shape) if stored is None else stored)
