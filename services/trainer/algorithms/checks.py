"""The check that stops a step before it changes the weights: for values that are NaN or infinite."""

from collections.abc import Sequence

from torch import Tensor

from millrace.errors import NonFinite


def check_finite(what: str, values_bt: Tensor, mask_bt: Tensor, labels: Sequence[str] | None = None) -> None:
    """Raises NonFinite if a value that counts is NaN or infinite. The error names the first such sequence and token.

    values_bt, mask_bt: [B, T]. `what` names the values in the error, for example "rewards"; `labels` are names of the
    sequences, which the error otherwise gives by their index.
    """
    bad_bt = mask_bt.bool() & ~values_bt.isfinite()
    rows = bad_bt.any(dim=-1).nonzero().flatten().tolist()
    if not rows:
        return
    row = rows[0]
    token = int(bad_bt[row].nonzero()[0])
    name = f"trajectory {labels[row]}" if labels is not None else f"sequence {row}"
    raise NonFinite(
        f"{what}: {values_bt[row, token].item()} at token {token} of {name}"
        f" ({int(bad_bt.sum())} such values in {len(rows)} of {values_bt.shape[0]} sequences).",
        "Nothing was written to the weights. Look at that trajectory's reward and log-probabilities; lower the learning"
        " rate or compute in fp32 if they overflowed.",
    )
