"""The same batch trained by Hugging Face's model and torch's AdamW, one sequence at a time: the reference."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from millrace.weights.folder_tensors import INNER
from tests.services.trainer.backends.megatron.batch import (
    CLIP_NORM,
    OPTIMIZER,
    TEMPERATURE,
    experts_told,
    loss_of,
    trajectories,
)


@dataclass(frozen=True)
class Run:
    losses: list[float]
    norms: list[float]
    logprobs: list[float]
    """Log-probability of every response token, by row, before the first update."""
    entropies: list[float]
    """Entropy at every response token, likewise."""
    weights: dict[str, Tensor]
    """Weights after the last update, by their names in the model folder."""


def scores(model: PreTrainedModel, row: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the response tokens, [R]."""
    trajectory = trajectories()[row]
    tokens = torch.from_numpy(np.concatenate([trajectory.prompt, trajectory.response]).astype(np.int64))
    first = len(trajectory.prompt)
    log_p = (model(tokens[None]).logits[0, first - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(1, tokens[first:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def train(model: PreTrainedModel, steps: int, *, balance: float = 0.0, told: bool = False) -> Run:
    """`balance` is the coefficient of the auxiliary loss of mixtures of experts, over four micro-batches. `told`:
    tokens go to the experts of `experts_told`."""
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    losses, norms, logprobs, entropies = [], [], [], []
    routed = Routed(model) if balance else None
    teller = Told(model) if told else None
    for step in range(steps):
        scored = []
        for row in range(16):
            if teller is not None:
                teller.row = row
            scored.append(scores(model, row))
        loss = sum(loss_of(*scored[row], (row,)) for row in range(16))
        optimizer.zero_grad()
        objective = loss if routed is None else loss + balance * routed.auxiliary_loss()
        objective.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
        if step == 0:
            logprobs, entropies = (torch.cat(parts).tolist() for parts in zip(*scored, strict=True))
    return Run(losses, norms, logprobs, entropies, stored(model))


class Told:
    """Routers of Qwen3-MoE that send the tokens of `row` where they are told to."""

    row = 0

    def __init__(self, model: PreTrainedModel) -> None:
        routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._send, layer))

    def _send(self, layer: int, router: object, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> object:
        logits_te, _, own_tk = outputs
        told_tk = experts_told(self.row)[:, layer]
        chosen_tk = torch.where(told_tk < 0, own_tk, told_tk)
        return logits_te, logits_te.gather(1, chosen_tk).softmax(-1), chosen_tk


class Routed:
    """The routers' logits of sixteen sequences, as the switch transformer's loss needs them (arXiv 2101.03961)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._experts_per_token = model.config.num_experts_per_tok
        self._routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        self._logits: dict[int, list[Tensor]] = {}
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._keep, layer))

    def _keep(self, layer: int, router: object, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        self._logits.setdefault(layer, []).append(outputs[0])

    def auxiliary_loss(self) -> Tensor:
        """E · Σ fraction · mean probability, summed over layers, the mean of the batch's four micro-batches."""
        total = torch.zeros(())
        for rows in self._logits.values():
            for batch in range(4):
                logits_te = torch.cat(rows[batch * 4 : batch * 4 + 4])
                probabilities_te = logits_te.softmax(-1)
                chosen = logits_te.topk(self._experts_per_token).indices
                fractions = torch.bincount(chosen.flatten(), minlength=logits_te.shape[1]) / chosen.numel()
                total = total + logits_te.shape[1] * (fractions * probabilities_te.mean(0)).sum() / 4
        self._logits.clear()
        return total


def stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights as save_pretrained would write them, but for the place of a language model in a larger one."""
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        named |= revert_weight_conversion(model, {name: tensor.detach()})
    return {name.replace(f"model.{INNER}", "model."): tensor for name, tensor in named.items()}
