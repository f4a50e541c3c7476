"""The critic: a second model like the policy, with a value head and its own optimizer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from millrace.errors import refused
from millrace.megatron.architectures import read_shape
from millrace.megatron.rules import check
from millrace.memory.ledger import Part
from millrace.spec import JobSpec
from millrace.weights.plans.manifest import TensorInfo
from services.trainer.backends.megatron.backend import MegatronBackend, ModelSetup
from services.trainer.checkpoints.model_files import CRITIC_FIELD, config_changes, stored_head
from services.trainer.protocol.backend import Output, ValueLossFn
from services.trainer.protocol.local_tensors import NamedTensors
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives

UNUSED = 1.0
"""Temperature for the passes of the critic, where it has no effect."""


def build_critic(spec: JobSpec, setup: ModelSetup) -> "MegatronCritic":
    """The critic for a policy of `setup`. Raises InvalidJob, on every rank, for a folder that is not one of a
    critic."""
    chosen = spec.algorithm.critic
    assert chosen is not None
    folder = Path(chosen.path or spec.model.path)
    weights = spec.model.weights if chosen.path is None else None
    with collectives.fail_together():
        shape = read_shape(folder, CRITIC_FIELD)
        check(setup.options, shape, dist.get_world_size(), cuda=setup.device.type == "cuda")
        if shape.vocabulary != setup.shape.vocabulary:
            reason = f"it knows {shape.vocabulary} tokens and the policy {setup.shape.vocabulary}"
            raise refused(CRITIC_FIELD, str(folder), reason, "give a model with the policy's tokenizer.")
        stored_head(folder, shape.hidden)
    critic_spec = spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"path": str(folder), "weights": weights, "lora": None}),
            "algorithm": spec.algorithm.model_copy(update={"critic": None, "kl": None}),
            "trainer": spec.trainer.model_copy(update={"optimizer": chosen.optimizer}),
        }
    )
    return MegatronCritic(MegatronBackend(critic_spec, replace(setup, shape=shape.as_critic(), adapter=None)), folder)


class MegatronCritic:
    """Implements `services.trainer.protocol.backend.Critic`."""

    def __init__(self, model: MegatronBackend, folder: Path) -> None:
        self._model = model
        self.folder = folder
        self.cost = model.cost
        self.config: Mapping[str, object] = config_changes(
            json.loads((folder / "config.json").read_text()).get("architectures") or []
        )

    @property
    def updates(self) -> int:
        return self._model.updates

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        return self._model.logprobs(microbatches, temperature=UNUSED)

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], loss_fn: ValueLossFn[Output], *, more: bool = False
    ) -> list[Output]:
        alone = [batch.without_others() for batch in microbatches]
        return self._model.forward_backward(
            alone, lambda batch, scores: loss_fn(batch, scores.logprobs_r), temperature=UNUSED, more=more
        )

    def gradient_norm(self) -> float:
        return self._model.gradient_norm()

    def prepare_update(self) -> None:
        self._model.prepare_update()

    def optimizer_step(self, *, lr: float, gradient_scale: float) -> None:
        self._model.optimizer_step(lr=lr, gradient_scale=gradient_scale)

    def zero_gradients(self) -> None:
        self._model.zero_gradients()

    def abandon_pass(self) -> None:
        self._model.abandon_pass()

    def held(self) -> dict[Part, list[Tensor]]:
        return self._model.held()

    def state(self) -> NamedTensors:
        return self._model.state()

    def prepare_state(self, updates: int) -> NamedTensors:
        return self._model.prepare_state(updates)

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        return self._model.export(dtype)
