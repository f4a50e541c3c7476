"""PPO with a critic in plain PyTorch on one padded batch: from the papers' formulas, without anything of millrace's."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from millrace.contracts.v1 import common_pb2
from tests.services.trainer.step.plain_grpo import Plain, numbered, reach


@dataclass
class PlainPpo(Plain):
    """A policy, and a separate decoder with a linear head as critic; `gamma` and `lam` are those of the advantages."""

    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        critic = self.spec.algorithm.critic
        assert critic is not None
        self.decoder = AutoModel.from_pretrained(self.folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.head = torch.nn.Linear(self.decoder.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)
        chosen = critic.optimizer
        self.critic_optimizer = torch.optim.AdamW(
            [*self.decoder.parameters(), *self.head.parameters()],
            lr=0.0,
            betas=chosen.betas,
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
        )

    def ppo_step(self, groups: list[common_pb2.Group], *, lr: float | None, critic_lr: float) -> dict[str, float]:
        """One step; without `lr` the critic's alone. Returns means over its updates."""
        spec, updates = self.spec, self.spec.trainer.updates_per_step
        rows = numbered(groups)
        tokens_bt, prompts_b, mask_bt = self._padded(groups, rows)
        with torch.no_grad():
            old_bt, _ = self._logprobs(self.model, tokens_bt, prompts_b, mask_bt)
            ref_bt, _ = self._logprobs(self.reference, tokens_bt, prompts_b, mask_bt)
            values_bt = self._values(tokens_bt, prompts_b, mask_bt)
        rewards_bt = torch.zeros(mask_bt.shape)
        for row, (_, _, trajectory) in enumerate(rows):
            rewards_bt[row, int(reach(mask_bt)[row]) - 1] = trajectory.reward
            for turn in trajectory.turns:
                rewards_bt[row, turn.end - 1] += turn.reward
        if spec.algorithm.kl is not None:  # k1 in the reward
            rewards_bt -= spec.algorithm.kl_coefficient * torch.where(mask_bt, old_bt - ref_bt, 0)
        advantages_bt, returns_bt = self._gae(rows, rewards_bt, values_bt, mask_bt)
        told: dict[str, list[float]] = {"actor/pg_loss": [], "critic/vf_loss": [], "critic/grad_norm": []}
        share = len(groups) // updates
        for update in range(updates):
            inside = torch.tensor([g // share == update for g, _, _ in rows])
            given = tokens_bt[inside], prompts_b[inside], mask_bt[inside]
            self._critic_update(*given, values_bt[inside], returns_bt[inside], critic_lr, told)
            if lr is not None:
                self._actor_update(*given, old_bt[inside], advantages_bt[inside], lr, told)
        return {name: sum(values) / len(values) for name, values in told.items() if values}

    def _gae(self, rows: list[Any], rewards_bt: Tensor, values_bt: Tensor, mask_bt: Tensor) -> tuple[Tensor, Tensor]:
        advantages_bt, after = torch.zeros(mask_bt.shape), None
        for row in reversed(range(len(mask_bt))):
            if rows[row][:2] != after:  # the last trajectory of an episode
                following, next_value, after = 0.0, 0.0, rows[row][:2]
            for t in reversed(mask_bt[row].nonzero()[:, 0].tolist()):
                delta = float(rewards_bt[row, t]) + self.gamma * next_value - float(values_bt[row, t])
                following = delta + self.gamma * self.lam * following
                advantages_bt[row, t], next_value = following, float(values_bt[row, t])
        returns_bt = advantages_bt + values_bt
        kept = advantages_bt[mask_bt].double()
        return ((advantages_bt - kept.mean()) / math.sqrt(float(kept.var()) + 1e-8)).float(), returns_bt

    def _critic_update(self, tokens_bt: Tensor, prompts_b: Tensor, mask_bt: Tensor, old_bt: Tensor, returns_bt: Tensor,
                       lr: float, told: dict[str, list[float]]) -> None:  # fmt: skip
        critic = self.spec.algorithm.critic
        assert critic is not None and critic.clip is not None
        values_bt = self._values(tokens_bt, prompts_b, mask_bt)
        near_bt = torch.clamp(values_bt - old_bt, -critic.clip, critic.clip) + old_bt
        loss_bt = 0.5 * torch.maximum((values_bt - returns_bt) ** 2, (near_bt - returns_bt) ** 2)
        loss = loss_bt[mask_bt].mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        parameters = [p for group in self.critic_optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, critic.optimizer.clip_grad_norm)
        self.critic_optimizer.param_groups[0]["lr"] = lr
        self.critic_optimizer.step()
        told["critic/vf_loss"].append(loss.item())
        told["critic/grad_norm"].append(norm.item())

    def _actor_update(self, tokens_bt: Tensor, prompts_b: Tensor, mask_bt: Tensor, old_bt: Tensor,
                      advantages_bt: Tensor, lr: float, told: dict[str, list[float]]) -> None:  # fmt: skip
        options = self.spec.algorithm.policy_loss.options
        logprobs_bt, _ = self._logprobs(self.model, tokens_bt, prompts_b, mask_bt)
        ratio_bt = (logprobs_bt - old_bt).exp()
        clipped_bt = ratio_bt.clamp(1 - options["clip_low"], 1 + options["clip_high"])
        loss_bt = torch.maximum(-ratio_bt * advantages_bt, -clipped_bt * advantages_bt)
        loss_bt = torch.where(advantages_bt < 0, torch.minimum(loss_bt, -3.0 * advantages_bt), loss_bt)
        loss = loss_bt[mask_bt].mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.trainer.optimizer.clip_grad_norm)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        told["actor/pg_loss"].append(loss.item())

    def _values(self, tokens_bt: Tensor, prompts_b: Tensor, mask_bt: Tensor) -> Tensor:
        """Values before each response token, in rows that begin at the response."""
        lengths_b = prompts_b + reach(mask_bt)
        attention_bt = torch.arange(tokens_bt.shape[1])[None] < lengths_b[:, None]
        hidden: Any = self.decoder(input_ids=tokens_bt, attention_mask=attention_bt.long()).last_hidden_state
        every_bt = self.head(hidden).squeeze(-1)
        values_bt = torch.zeros(mask_bt.shape)
        for row in range(len(tokens_bt)):
            first, count = int(prompts_b[row]), int(reach(mask_bt)[row])
            values_bt[row, :count] = every_bt[row, first - 1 : first - 1 + count]
        return values_bt
