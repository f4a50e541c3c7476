"""How new weights reach the replicas."""

from typing import Literal

from millrace.validation.model import StrictModel


class Publication(StrictModel):
    path: Literal["auto", "sharded", "delta", "gather_broadcast"] = "auto"
    """sharded: every replica gets exactly the slices that it needs, from the ranks that hold them. delta: as sharded,
    but only what changed since the version that the replicas hold is sent; the trainer keeps that version in host
    memory. gather_broadcast: each tensor is gathered on one rank and broadcast. auto: sharded where the trainer and all
    replicas support it, and delta where that takes longer than a second and delta was measured to be faster."""
    commit: Literal["auto", "shadow", "inplace"] = "auto"
    """shadow: weights are received into spare memory while requests run, and the pause is a copy on the device.
    inplace: generation is paused during the transfer, which needs no spare memory. auto: shadow where there is enough
    memory."""
