"""The parts of a rank's memory, the phases of a step, and the bytes of each part."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

GB = 1e9


class Part(StrEnum):
    """What memory is used for."""

    WEIGHTS = "weights"
    """The policy's weights as they are kept between passes."""
    GRADIENTS = "gradients"
    """The policy's gradients, summed over micro-batches."""
    OPTIMIZER = "optimizer"
    """The moments, and float32 weights that are kept in addition to the policy's weights."""
    ADAPTER = "adapter"
    """Weights, gradients and moments of an adapter."""
    REFERENCE = "reference"
    """The weights of the reference policy."""
    CRITIC = "critic"
    """Weights, gradients and optimizer of the critic."""
    GATHERED = "gathered"
    """Whole layers in the dtype of the pass, and their gradients before they are divided over the ranks."""
    ACTIVATIONS = "activations"
    """What the backward pass needs of the forward pass."""
    LOGITS = "logits"
    """A chunk of logits, and the gradient of the head's weight."""
    STAGING = "staging"
    """Buffers of a publication."""
    KV_CACHE = "kv_cache"
    """Keys and values of the tokens in a replica, and the states of its requests in recurrent layers."""


KEPT = (Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.ADAPTER, Part.REFERENCE, Part.CRITIC)
"""Parts that can be measured exactly: they are tensors that the backend keeps. The others exist during a pass only."""


class Phase(StrEnum):
    """A part of a trainer's work that is measured by itself."""

    LOAD = "load"
    SCORING = "scoring"
    """Forward passes before the update: log-probabilities and values."""
    UPDATE = "update"
    PUBLICATION = "publication"


@dataclass(frozen=True)
class Ledger:
    """Bytes by part."""

    device: Mapping[Part, float]
    """What lies on the rank's device."""
    host: Mapping[Part, float] = field(default_factory=dict)
    """What lies in host memory because the job offloads it, or keeps there what it published."""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return sum(self.device.values())

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(_sum(self.device, other.device), _sum(self.host, other.host))

    def under(self, part: Part) -> "Ledger":
        """The same bytes, all of them of one part."""
        return Ledger({part: self.total}, {part: sum(self.host.values())})

    def largest_first(self) -> Iterator[tuple[Part, float]]:
        """The parts on the device that are not empty."""
        yield from sorted(((part, size) for part, size in self.device.items() if size), key=lambda each: -each[1])


def _sum(one: Mapping[Part, float], other: Mapping[Part, float]) -> dict[Part, float]:
    return {part: one.get(part, 0.0) + other.get(part, 0.0) for part in (*one, *other)}


Prediction = Mapping[Phase, Ledger]
"""The peak of each phase on the rank that needs most."""


def fullest(ledgers: Sequence[Ledger]) -> Ledger:
    """The ledger with the largest total."""
    return max(ledgers, key=lambda ledger: ledger.total)


def peak(prediction: Prediction) -> Ledger:
    """The ledger of the phase that needs most."""
    return fullest(list(prediction.values()))
