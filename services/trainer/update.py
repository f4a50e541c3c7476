"""One optimizer update on its share of the batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.errors import NonFinite
from millrace.rl.aggregation import BatchTotals
from millrace.rl.checks import check_finite
from millrace.rl.metrics import summarised
from millrace.spec import JobSpec
from services.trainer import lockstep
from services.trainer.backends import Backend, LossFn
from services.trainer.batch import Batch
from services.trainer.loss import ActorLoss, Columns
from services.trainer.metrics import over_ranks
from services.trainer.microbatch import MicroBatch

CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Updated:
    metrics: dict[str, float]
    logprobs_bt: Tensor
    """[rows, longest]: under the weights before this update; 0 in rows that it did not train."""
    mask_bt: Tensor
    """The response tokens of the rows that it trained."""


def update(
    spec: JobSpec, backend: Backend, batch: Batch, microbatches: Sequence[MicroBatch], columns: Columns, lr: float
) -> Updated:
    """Forward and backward over the micro-batches, then one step of the optimizer. Raises NonFinite before anything is
    written where a log-probability or a gradient is NaN or infinite."""
    trained_b = torch.zeros(len(batch.samples), dtype=torch.bool, device=batch.device)
    trained_b[[row for microbatch in microbatches for row in microbatch.rows]] = True
    totals = _totals(columns.mask_bt & trained_b[:, None], backend)
    loss, group = ActorLoss(spec, columns, totals), backend.data_parallel.group
    outputs = backend.forward_backward(microbatches, loss, temperature=spec.rollout.temperature)
    logprobs_bt = batch.scattered(microbatches, [output.logprobs_r for output in outputs])
    mask_bt = batch.mask_bt & trained_b[:, None]
    try:
        with lockstep.together():
            check_finite("log-probabilities", logprobs_bt, mask_bt, batch.labels)
        norm = backend.gradient_norm()
        if not math.isfinite(norm):
            raise _blamed(spec, backend, batch, microbatches, loss, norm)
    except NonFinite:
        backend.zero_gradients()
        raise
    scale = min(1.0, spec.trainer.optimizer.clip_grad_norm / (norm + CLIP_EPS))
    backend.optimizer_step(lr=lr, gradient_scale=scale)
    metrics = summarised(over_ranks([output.metrics for output in outputs], group))
    return Updated({**metrics, "grad_norm": norm, "lr": lr}, logprobs_bt, mask_bt)


def _totals(mask_bt: Tensor, backend: Backend) -> BatchTotals:
    """Of the update's tokens that count, over all ranks."""
    mine = BatchTotals.of(mask_bt)
    if backend.data_parallel.group is None:
        return mine
    counts = torch.tensor([mine.tokens, mine.sequences])
    dist.all_reduce(counts, group=backend.data_parallel.group)
    return BatchTotals(*counts.tolist())


def _blamed(
    spec: JobSpec,
    backend: Backend,
    batch: Batch,
    microbatches: Sequence[MicroBatch],
    loss: LossFn,
    norm: float,
) -> NonFinite:
    """Runs the sequences one by one, each rank its own, until the gradient is not finite again."""
    rows = [row for microbatch in microbatches for row in microbatch.rows]
    for turn in range(int(lockstep.maxima({"rows": len(rows)})["rows"])):
        mine = rows[turn : turn + 1]
        backend.zero_gradients()
        alone = MicroBatch.pack(batch.samples, mine)
        backend.forward_backward([alone], loss, temperature=spec.rollout.temperature)
        if not math.isfinite(backend.gradient_norm()):
            labels = lockstep.gather_bytes("".join(batch.labels[row] for row in mine).encode())
            names = " or ".join(sorted({label.decode() for label in labels if label}))
            return NonFinite(f"gradients: their norm is {norm} because of {names}.", _MEND)
    return NonFinite(f"gradients: their norm is {norm}, though no trajectory's alone is.", _MEND)


_MEND = (
    "nothing was written to the weights. Look at that trajectory; lower the learning rate or compute in float32 if its"
    " gradient overflowed."
)
