"""Log-probabilities and entropies from hidden states, for a vocabulary that is split over ranks, without all logits.

Logits exist for a chunk of tokens and this rank's part of the vocabulary at a time, in the forward pass and again in
the backward pass. With z = logits/τ, p = softmax(z): ∂log p_y/∂z = 1_y − p and ∂H/∂z = −p·(log p + H). What a model
does to each output of its linear layer (`LogitChange`) is part of z. On GPUs the computation on each output is one
compiled kernel, so that outputs are read once in each pass.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class WantedTokens:
    """The tokens to score: the token after each of the positions."""

    positions_r: Tensor
    """Indices into the packed tokens, int64 [R]."""
    targets_r: Tensor
    """Ids of the tokens to score, int64 [R]."""
    temperature: float
    others_rk: Tensor | None = None
    """Further tokens to score at each of the positions, int64 [R, K]; None: there are none."""

    @property
    def columns_rk(self) -> Tensor:
        """The tokens to score at each position: the target first, then the others, int64 [R, 1 + K]."""
        targets_r1 = self.targets_r[:, None]
        return targets_r1 if self.others_rk is None else torch.cat([targets_r1, self.others_rk], dim=1)


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's part of the vocabulary: tokens `start` to `start + size`, the first rows of its weight. The rows
    after them are padding."""

    start: int
    size: int
    group: dist.ProcessGroup | None
    """The ranks that hold all parts; None if this rank holds the whole vocabulary."""


@dataclass(frozen=True)
class LogitChange:
    """What a model does to each output y of its linear layer. Its logits are scale·y, or with a cap the soft-capped
    cap·tanh(scale·y/cap)."""

    scale: float = 1.0
    cap: float | None = None

    def divided(self, temperature: float) -> "LogitChange":
        """From outputs to logits/temperature."""
        return LogitChange(self.scale / temperature, None if self.cap is None else self.cap / temperature)


def scores(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    wanted: WantedTokens,
    vocabulary: VocabularyPart,
    chunk_tokens: int,
    *,
    bias_v: Tensor | None = None,
    change: LogitChange = LogitChange(),
) -> Tensor:
    """Log-probabilities at the targets, entropies, and log-probabilities of the other tokens, float32 [2 + K, R], nats,
    the same on every rank of the group.

    hidden_rh [R, H], weight_vh [padded part of V, H] and bias_v [padded part of V] of one dtype. The gradient of
    hidden_rh is this rank's part. A frozen weight has no gradient, and none is computed.
    """
    scores_kr: Tensor = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden_rh, weight_vh, bias_v, wanted, vocabulary, chunk_tokens, change
    )
    return scores_kr


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_rh: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        wanted: WantedTokens,
        vocabulary: VocabularyPart,
        chunk_tokens: int,
        change: LogitChange,
    ) -> Tensor:
        rows = 1 + wanted.columns_rk.shape[1]
        scores_kr = torch.empty(rows, hidden_rh.shape[0], dtype=torch.float32, device=hidden_rh.device)
        normaliser_r = torch.empty_like(scores_kr[0])
        for part in _chunks(hidden_rh, chunk_tokens):
            outputs_rv = _linear(hidden_rh[part], weight_vh, bias_v, vocabulary)
            normaliser_r[part], scores_kr[:, part] = _normalised(outputs_rv, wanted, part, vocabulary, change)
        ctx.save_for_backward(hidden_rh, weight_vh, bias_v, normaliser_r, scores_kr)
        ctx.rest = wanted, vocabulary, chunk_tokens, change
        return scores_kr

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kr: Tensor) -> Any:
        hidden_rh, weight_vh, bias_v, normaliser_r, scores_kr = ctx.saved_tensors
        wanted, vocabulary, chunk_tokens, change = ctx.rest
        size = vocabulary.size
        grad_hidden_rh = torch.empty_like(hidden_rh) if ctx.needs_input_grad[0] else None
        grad_weight_vh = _zeros_like(weight_vh) if ctx.needs_input_grad[1] else None
        grad_bias_v = _zeros_like(bias_v) if ctx.needs_input_grad[2] else None
        for part in _chunks(hidden_rh, chunk_tokens):
            grad_rk = torch.cat([grad_kr[:1, part], grad_kr[2:, part]]).t()
            known = [normaliser_r[part], scores_kr[1, part], grad_rk.sum(1), grad_kr[1, part], grad_rk[:, 0]]
            outputs_rv = _linear(hidden_rh[part], weight_vh, bias_v, vocabulary)
            grad_rv = _chunk_gradient(outputs_rv, torch.stack(known), grad_rk, wanted, part, vocabulary, change)
            del outputs_rv
            if grad_hidden_rh is not None:
                grad_hidden_rh[part] = grad_rv @ weight_vh[:size]
            if grad_weight_vh is not None:
                _add_product(grad_weight_vh[:size], grad_rv.t(), hidden_rh[part])
            if grad_bias_v is not None:
                grad_bias_v[:size] += grad_rv.sum(0, dtype=torch.float32)
        grad_weight = None if grad_weight_vh is None else grad_weight_vh.to(weight_vh.dtype)
        grad_bias = None if grad_bias_v is None else grad_bias_v.to(bias_v.dtype)
        return grad_hidden_rh, grad_weight, grad_bias, None, None, None, None


def _linear(hidden_rh: Tensor, weight_vh: Tensor, bias_v: Tensor | None, vocabulary: VocabularyPart) -> Tensor:
    """The outputs of the linear layer for this rank's part of the vocabulary, [R, V]. A product adds the bias without
    another pass over them."""
    columns_hv = weight_vh[: vocabulary.size].t()
    return hidden_rh @ columns_hv if bias_v is None else torch.addmm(bias_v[: vocabulary.size], hidden_rh, columns_hv)


def _zeros_like(parameter: Tensor) -> Tensor:
    """float32: a gradient that is summed over chunks would lose precision in the parameter's dtype."""
    return torch.zeros_like(parameter, dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, float32. On GPUs the product of half precision is added as it is computed: to write
    it, read it and add it takes longer than to compute it."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _normalised(
    outputs_rv: Tensor, wanted: WantedTokens, part: slice, vocabulary: VocabularyPart, change: LogitChange
) -> tuple[Tensor, Tensor]:
    """log Σ exp z over the whole vocabulary, [R], and the scores, [2 + K, R]."""
    to_z = change.divided(wanted.temperature)
    local_r, sums_2r = _fused(_part_sums)(outputs_rv, to_z.scale, to_z.cap)
    top_r = local_r.clone()
    _all_reduce(top_r, dist.ReduceOp.MAX, vocabulary)
    here_rk, column_rk = _in_part(wanted.columns_rk[part], vocabulary)
    wanted_rk = _z(outputs_rv.gather(1, column_rk), to_z.scale, to_z.cap) * here_rk
    sums_kr = torch.cat([sums_2r * (local_r - top_r).exp(), wanted_rk.t()])
    _all_reduce(sums_kr, dist.ReduceOp.SUM, vocabulary)
    normaliser_r = top_r + sums_kr[0].log()
    entropy_r = normaliser_r - sums_kr[1] / sums_kr[0]
    return normaliser_r, torch.cat([(sums_kr[2] - normaliser_r)[None], entropy_r[None], sums_kr[3:] - normaliser_r])


def _chunk_gradient(
    outputs_rv: Tensor,
    known_5r: Tensor,
    grad_rk: Tensor,
    wanted: WantedTokens,
    part: slice,
    vocabulary: VocabularyPart,
    change: LogitChange,
) -> Tensor:
    """The gradient of a chunk's outputs, [R, V], in their dtype. `known_5r`: see `_outputs_gradient`; `grad_rk`: the
    gradients of the log-probabilities of the target and of the others."""
    to_z = change.divided(wanted.temperature)
    here_rk, column_rk = _in_part(wanted.columns_rk[part], vocabulary)
    target_r = torch.where(here_rk[:, 0], column_rk[:, 0], -1)
    grad_rv: Tensor = _fused(_outputs_gradient)(outputs_rv, known_5r, target_r, to_z.scale, to_z.cap)
    if column_rk.shape[1] > 1:
        others = column_rk[:, 1:]
        logits_rk = _z(outputs_rv.gather(1, others), change.scale, change.cap)
        added_rk = grad_rk[:, 1:] * here_rk[:, 1:] * _slope(logits_rk, change.scale, change.cap) / wanted.temperature
        grad_rv.scatter_add_(1, others, added_rk.to(grad_rv.dtype))
    return grad_rv


def _z(outputs: Tensor, scale: float, cap: float | None) -> Tensor:
    """The outputs as `LogitChange` says, float32."""
    scaled = outputs.float() * scale
    return scaled if cap is None else cap * (scaled / cap).tanh()


def _slope(z: Tensor, scale: float, cap: float | None) -> Tensor | float:
    """∂z/∂output where the result is z."""
    return scale if cap is None else scale * (1 - (z / cap).square())


def _part_sums(outputs_rv: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """max z, [R], and Σ exp(z − max) and Σ z·exp(z − max), [2, R], all float32."""
    z_rv = _z(outputs_rv, scale, cap)
    top_r = z_rv.amax(dim=-1)
    weights_rv = (z_rv - top_r[:, None]).exp()
    return top_r, torch.stack([weights_rv.sum(dim=-1), (weights_rv * z_rv).sum(dim=-1)])


def _outputs_gradient(
    outputs_rv: Tensor, known_5r: Tensor, column_r: Tensor, scale: float, cap: float | None
) -> Tensor:
    """The gradient of the outputs, [R, V], in their dtype, without what the other tokens add in their columns.

    `known_5r`: normaliser, entropy, and the gradients of the sum of all log-probabilities, of the entropy, and of the
    target's log-probability. `column_r`: the column of the target, negative where another rank has it.
    """
    normaliser, entropy, grad_sum, grad_entropy, grad_target = (known_r[:, None] for known_r in known_5r)
    z_rv = _z(outputs_rv, scale, cap)
    log_p = z_rv - normaliser
    grad_z = -log_p.exp() * (grad_sum + grad_entropy * (log_p + entropy))
    hit = torch.arange(outputs_rv.shape[1], device=outputs_rv.device) == column_r[:, None]
    grad_rv: Tensor = (grad_z + torch.where(hit, grad_target, 0.0)) * _slope(z_rv, scale, cap)
    return grad_rv.to(outputs_rv.dtype)


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled to one kernel on GPUs, and unchanged elsewhere."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True) if torch.cuda.is_available() else function
    return compiled


def _in_part(tokens_rk: Tensor, vocabulary: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Whether each token is in this rank's part, and its column there (any column where it is not)."""
    column_rk = tokens_rk - vocabulary.start
    here_rk = (column_rk >= 0) & (column_rk < vocabulary.size)
    return here_rk, column_rk.clamp(0, vocabulary.size - 1)


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, vocabulary: VocabularyPart) -> None:
    if vocabulary.group is not None:
        dist.all_reduce(tensor, op, group=vocabulary.group)


def _chunks(hidden_rh: Tensor, tokens: int) -> list[slice]:
    return [slice(start, start + tokens) for start in range(0, hidden_rh.shape[0], tokens)]


def gather_scores(mine_kr: Tensor, counts: tuple[int, ...], group: ProcessGroup | None) -> Tensor:
    """The scores of all ranks of the group, [k, R of all], in the order of the ranks.

    mine_kr: this rank's scores, [k, R of this rank]. counts: number of tokens that each rank scored. All ranks compute
    the same loss from the result. Each keeps the gradient of its own scores, so the sum of the ranks' gradients of a
    weight is its gradient.
    """
    if group is None or not any(counts):
        return mine_kr
    scores_kr: Tensor = _Gathered.apply(mine_kr, counts, group)  # type: ignore[no-untyped-call]
    return scores_kr


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine_kr: Tensor, counts: tuple[int, ...], group: ProcessGroup) -> Tensor:
        ctx.first = sum(counts[: group.rank()])
        ctx.count = mine_kr.shape[1]
        padded = mine_kr.new_zeros(mine_kr.shape[0], max(counts))
        padded[:, : ctx.count] = mine_kr
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded, group=group)
        return torch.cat([part[:, :count] for part, count in zip(everyone, counts, strict=True)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kr: Tensor) -> Any:
        return grad_kr[:, ctx.first : ctx.first + ctx.count], None, None
