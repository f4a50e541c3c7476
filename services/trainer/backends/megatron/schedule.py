"""Runs micro-batches through the pipeline by Megatron's schedules: one stage, 1F1B, or interleaved chunks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from millrace.backends.megatron import MegatronOptions
from millrace.errors import InvalidState
from services.trainer.backends.head import WantedTokens, gather_scores
from services.trainer.backends.megatron.experts import free_dispatchers
from services.trainer.backends.megatron.packing import PackedBatch, pack
from services.trainer.backends.tower import Images
from services.trainer.protocol.microbatch import MicroBatch

ScoreFn = Callable[[int, Tensor], Tensor]
"""Computes the loss of a micro-batch from its number and its scores [2 + K, R]. Called on the ranks with the last
layers."""


@dataclass(frozen=True)
class Pipeline:
    """The chunks of one model on this rank, with or without data-parallel wrappers."""

    chunks: Sequence[nn.Module]
    options: MegatronOptions
    device: torch.device
    images: Images | None = None
    """The places of images in sequences, with the tower on ranks of the first stage; None in a job without images."""

    def backward(self, microbatches: Sequence[MicroBatch], score: ScoreFn, *, temperature: float) -> list[Tensor]:
        """Adds the gradient of the sum of the losses over micro-batches and data-parallel ranks. Returns the scores of
        each micro-batch, [2 + K, R], without gradient, on every rank."""
        ranks = parallel_state.get_data_parallel_world_size()
        return self._run(microbatches, score, temperature, ranks)

    def forward(self, microbatches: Sequence[MicroBatch], *, temperature: float) -> list[Tensor]:
        """The scores of each micro-batch's sampled tokens alone, [2, R], on every rank."""
        with torch.no_grad():
            return self._run([batch.without_others() for batch in microbatches], None, temperature, 1)

    def _run(
        self, microbatches: Sequence[MicroBatch], score: ScoreFn | None, temperature: float, ranks: int
    ) -> list[Tensor]:
        # Interleaved chunks take micro-batches in groups of as many as there are stages.
        group = self.options.pipeline_parallel if self.options.virtual_pipeline > 1 else 1
        padding = [MicroBatch.pack([], [])] * (-len(microbatches) % group)
        batches = [*microbatches, *padding]
        scored: list[Tensor] = []
        numbered = list(enumerate(map(self._packed, batches)))

        def step(
            numbers: Iterator[tuple[int, PackedBatch]], model: nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, None]]]:
            number, packed = next(numbers)
            wanted = WantedTokens(packed.positions_r, packed.targets_r, temperature, packed.others_rk)
            output = model(packed.tokens_p[None], None, None, labels=wanted, packed_seq_params=packed.parameters)
            return output, partial(loss, number, packed)

        def loss(number: int, packed: PackedBatch, mine_kr: Tensor) -> tuple[Tensor, None]:
            scores_kr = whole_scores(mine_kr, packed)
            scored.append(scores_kr.detach())
            if score is None or number >= len(microbatches):
                return scores_kr.sum() * 0.0, None
            # The schedule divides by the number of micro-batches, and the reduction of the gradient by that of ranks.
            return score(number, scores_kr) * (len(batches) * ranks), None

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(numbered) for _ in self.chunks],
            model=list(self.chunks),
            num_microbatches=len(batches),
            seq_length=max(batch.tokens_p.shape[0] for batch in batches),
            micro_batch_size=1,
            forward_only=score is None,
        )
        free_dispatchers(self.chunks)
        return self._on_every_stage(scored, microbatches)

    def _packed(self, batch: MicroBatch) -> PackedBatch:
        recompute = self.options.recompute
        if batch.experts_plk is not None and recompute.granularity == "selective" and "moe" in recompute.modules:
            raise InvalidState(
                "experts that are recomputed separately do not get the engine's choices.",
                "set trainer.backend_options.recompute to full, or leave moe out of its modules.",
            )
        return pack(
            batch,
            multiple=self.options.tensor_parallel if self.options.splits_sequence else 1,
            context_rank=parallel_state.get_context_parallel_rank(),
            context_size=self.options.context_parallel,
            device=self.device,
            images=self.images,
        )

    def _on_every_stage(self, scored: list[Tensor], microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """Sends the scores from the last stage to the others."""
        if self.options.pipeline_parallel == 1:
            return scored
        counts = [sum(batch.sampled_lengths) for batch in microbatches]
        others = max(0 if batch.others_rk is None else batch.others_rk.shape[1] for batch in microbatches)
        flat = torch.empty(2 + others, sum(counts), dtype=torch.float32, device=self.device)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            flat = joined(scored[: len(counts)], 2 + others)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(flat, last, group=parallel_state.get_pipeline_model_parallel_group())
        parts: tuple[Tensor, ...] = flat.split(counts, dim=1)
        return list(parts)


def joined(scored: Sequence[Tensor], rows: int) -> Tensor:
    """The scores of several micro-batches, [rows, R]. Padding has no further tokens, and so fewer rows."""
    return torch.cat([F.pad(each_kr, (0, 0, 0, rows - len(each_kr))) for each_kr in scored], dim=1)


def whole_scores(mine_kr: Tensor, packed: PackedBatch) -> Tensor:
    """The scores of all context-parallel ranks, [2 + K, R], in the order of the micro-batch.

    All ranks compute the same loss. Each keeps the gradient of its part; these are summed with the gradients of
    data parallelism.
    """
    if packed.order_r is None:
        return mine_kr
    by_rank_kr = gather_scores(mine_kr, packed.counts, parallel_state.get_context_parallel_group())
    return by_rank_kr[:, packed.order_r]
