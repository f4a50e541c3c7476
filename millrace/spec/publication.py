"""How weights come to the replicas."""

from typing import Literal

from millrace.validation.model import StrictModel


class Publication(StrictModel):
    path: Literal["auto", "sharded", "gather_broadcast"] = "auto"
    """sharded: every replica gets exactly the slices that it needs from the ranks that hold them. gather_broadcast:
    each tensor is gathered on one rank and broadcast. auto: sharded where trainer and replicas all can."""
    commit: Literal["auto", "shadow", "inplace"] = "auto"
    """shadow: received into spare memory while requests run; the pause is a copy on the device. inplace: generation
    stands still during the transfer, which needs no spare memory. auto: shadow where the memory is there."""
