"""GRPO in plain PyTorch on one padded batch: from the papers' formulas, without anything of millrace's maths."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from millrace.contracts.v1 import common_pb2
from millrace.spec import JobSpec


def numbered(groups: list[common_pb2.Group]) -> list[Any]:
    """Each trajectory with the number of its group and of its episode there."""
    rows = []
    for g, group in enumerate(groups):
        sizes = group.episode_trajectories or [1] * len(group.trajectories)
        episodes = [number for number, size in enumerate(sizes) for _ in range(size)]
        rows += [(g, episode, t) for episode, t in zip(episodes, group.trajectories, strict=True)]
    return rows


def reach(mask_bt: Tensor) -> Tensor:
    """Number of columns up to each row's last true one."""
    return (mask_bt * torch.arange(1, mask_bt.shape[1] + 1)).amax(-1)


@dataclass
class Plain:
    """A model and its optimizer; `step` is one GRPO step on whole groups, padded on the right."""

    folder: Path
    spec: JobSpec
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    kl_losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        chosen = self.spec.trainer.optimizer
        self.model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.reference = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=chosen.betas, eps=chosen.eps, weight_decay=chosen.weight_decay
        )

    def step(self, groups: list[common_pb2.Group], lr: float) -> None:
        spec, updates = self.spec, self.spec.trainer.updates_per_step
        rows = numbered(groups)
        tokens_bt, prompts_b, mask_bt = self._padded(groups, rows)
        rollout_bt = torch.zeros(mask_bt.shape)
        for row, (_, _, trajectory) in enumerate(rows):
            values = np.frombuffer(trajectory.logprobs, np.float32)
            rollout_bt[row, mask_bt[row]] = torch.tensor(values)
        with torch.no_grad():
            old_bt = self._logprobs(self.model, tokens_bt, prompts_b, mask_bt)[0]
            ref_bt = self._logprobs(self.reference, tokens_bt, prompts_b, mask_bt)[0]
        proximal_bt = rollout_bt if spec.algorithm.old_logprobs == "rollout" else old_bt
        advantages_b = self._advantages(rows, proximal_bt, ref_bt, mask_bt)
        weights_bt = torch.ones_like(old_bt)
        if spec.algorithm.correction is not None:  # tis_token with a cap of 2
            weights_bt = (old_bt - rollout_bt).exp().clamp(max=2.0)
        self.losses, self.norms, self.kl_losses = [], [], []
        share = len(groups) // updates
        for update in range(updates):
            inside = torch.tensor([g // share == update for g, _, _ in rows])
            self._update(
                tokens_bt[inside], prompts_b[inside], mask_bt[inside], proximal_bt[inside], ref_bt[inside],
                advantages_b[inside], weights_bt[inside], lr,
            )  # fmt: skip

    def _update(self, tokens_bt: Tensor, prompts_b: Tensor, mask_bt: Tensor, old_bt: Tensor, ref_bt: Tensor,
                advantages_b: Tensor, weights_bt: Tensor, lr: float) -> None:  # fmt: skip
        algorithm = self.spec.algorithm
        logprobs_bt, entropy_bt = self._logprobs(self.model, tokens_bt, prompts_b, mask_bt)
        low, high = algorithm.policy_loss.options["clip_low"], algorithm.policy_loss.options["clip_high"]
        ratio_bt, a_b1 = (logprobs_bt - old_bt).exp(), advantages_b[:, None]
        surrogate_bt = torch.maximum(-ratio_bt * a_b1, -ratio_bt.clamp(1 - low, 1 + high) * a_b1)
        surrogate_bt = torch.where(a_b1 < 0, torch.minimum(surrogate_bt, -3.0 * a_b1), surrogate_bt) * weights_bt
        pg_loss = self._mean(surrogate_bt, mask_bt)
        loss = pg_loss - algorithm.entropy_coefficient * self._mean(entropy_bt, mask_bt)
        if algorithm.kl is not None and algorithm.kl_in == "loss":  # k3
            delta_bt = ref_bt - logprobs_bt
            kl_loss = self._mean(delta_bt.exp() - delta_bt - 1, mask_bt)
            self.kl_losses.append(kl_loss.item())
            loss = loss + algorithm.kl_coefficient * kl_loss
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.trainer.optimizer.clip_grad_norm)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.losses.append(pg_loss.item())
        self.norms.append(norm.item())

    def _mean(self, values_bt: Tensor, mask_bt: Tensor) -> Tensor:
        if self.spec.algorithm.aggregation == "token-mean":
            return values_bt[mask_bt].mean()
        assert self.spec.algorithm.aggregation == "seq-mean-token-mean"
        return torch.stack([row[keep].mean() for row, keep in zip(values_bt, mask_bt, strict=True)]).mean()

    def _advantages(self, rows: list[Any], old_bt: Tensor, ref_bt: Tensor, mask_bt: Tensor) -> Tensor:
        algorithm, rewards = self.spec.algorithm, []
        for row, (_, _, trajectory) in enumerate(rows):
            length = len(trajectory.tokens) // 4
            reward = trajectory.reward + sum(turn.reward for turn in trajectory.turns)
            buffer = algorithm.overlong_buffer_tokens
            over = length - (self.spec.rollout.max_response_tokens - buffer)
            if buffer and over > 0:
                reward -= algorithm.overlong_penalty * over / buffer
            if algorithm.kl is not None and algorithm.kl_in == "reward":  # k1
                reward -= algorithm.kl_coefficient * float((old_bt - ref_bt)[row][mask_bt[row]].sum())
            rewards.append(reward)
        earned: dict[int, dict[int, float]] = {}
        for reward, (group, episode, _) in zip(rewards, rows, strict=True):
            of_group = earned.setdefault(group, {})
            of_group[episode] = of_group.get(episode, 0.0) + reward
        advantages = []
        for group, episode, _ in rows:
            values = earned[group].values()
            mean = math.fsum(values) / len(values)
            variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
            advantages.append((earned[group][episode] - mean) / (math.sqrt(variance) + 1e-6))
        return torch.tensor(advantages)

    def _padded(self, groups: list[common_pb2.Group], rows: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        whole, prompts, responses = [], [], []
        for group, _, trajectory in rows:
            prompt = np.frombuffer(trajectory.prompt_tokens or groups[group].prompt_tokens, np.int32)
            response = np.frombuffer(trajectory.tokens, np.int32)
            whole.append(torch.tensor(np.concatenate([prompt, response])).long())
            prompts.append(len(prompt))
            responses.append(len(response))
        tokens_bt = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
        mask_bt = torch.arange(max(responses))[None] < torch.tensor(responses)[:, None]
        for row, (_, _, trajectory) in enumerate(rows):
            inside = torch.zeros(len(mask_bt[row]), dtype=torch.bool)
            for turn in trajectory.turns:
                inside[turn.start : turn.end] = True
            if trajectory.turns:
                mask_bt[row] = inside
        return tokens_bt, torch.tensor(prompts), mask_bt

    def _logprobs(self, model: Any, tokens_bt: Tensor, prompts_b: Tensor, mask_bt: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the response tokens, in rows that begin at the response."""
        lengths_b = prompts_b + reach(mask_bt)
        attention_bt = torch.arange(tokens_bt.shape[1])[None] < lengths_b[:, None]
        logits = model(input_ids=tokens_bt, attention_mask=attention_bt.long()).logits / self.spec.rollout.temperature
        logp = logits.log_softmax(-1)
        logprobs_bt, entropy_bt = torch.zeros(mask_bt.shape), torch.zeros(mask_bt.shape)
        for row in range(len(tokens_bt)):
            first, count = int(prompts_b[row]), int(reach(mask_bt)[row])
            before = logp[row, first - 1 : first - 1 + count]
            picked = tokens_bt[row, first : first + count]
            logprobs_bt[row, :count] = before[torch.arange(count), picked]
            entropy_bt[row, :count] = -(before.exp() * before).sum(-1)
        return logprobs_bt, entropy_bt
