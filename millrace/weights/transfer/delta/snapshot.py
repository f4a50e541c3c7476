"""The messages that a sending rank sent last, in host memory: what the next version is compared with."""

from collections.abc import Mapping

import torch

from millrace.weights.transfer.delta.codec import Coding, Header, changed_words, encode

FEW = 50
"""Where fewer than one word in so many bytes changed, these are copied by themselves."""


class Snapshot:
    """The bytes of every message that one rank packs, by content of the plan.

    What always holds: while `publication` names a publication, the bytes are those that every receiver of it has put
    in place, or will not serve. The name is taken away before the first byte changes, and given again by whoever knows
    that a publication sent everything.
    """

    def __init__(self, plan_hash: bytes, sizes: Mapping[int, int], device: torch.device) -> None:
        """`sizes`: bytes of each content's message. The host memory is pinned where `device` is a GPU. Raises
        RuntimeError where there is not enough."""
        self.plan_hash = plan_hash
        self.publication = ""
        """Key of the publication whose messages these are; empty for none."""
        memory = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=device.type == "cuda")
        parts = torch.split(memory, list(sizes.values()))
        self._messages = dict(zip(sizes, parts, strict=True))
        self.bytes = memory.numel()

    def encode(self, content: int, message: torch.Tensor, *, whole: bool) -> tuple[Header, torch.Tensor]:
        """How a message ([bytes] uint8) travels to receivers that hold the snapshot's, or with `whole` to others; from
        now on the snapshot holds it. On a GPU the work is put on the current stream."""
        kept = self._messages[content]
        if whole:
            kept.copy_(message, non_blocking=True)
            return Header(Coding.WHOLE, message.numel()), message
        base = kept.to(message.device, non_blocking=True)
        changed = changed_words(base, message)
        header, encoded = encode(base, message, changed)
        if kept.device == message.device and FEW * header.changed < message.numel():
            new = message.view(torch.int16).index_select(0, changed)
            kept.view(torch.int16).index_copy_(0, changed, new)
        elif header.changed:
            kept.copy_(message, non_blocking=True)
        return header, encoded
