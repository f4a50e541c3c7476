"""Whether whole weights or only what changed are sent, where the job leaves it open: by what both took before."""

from dataclasses import dataclass

WORTH_S = 1.0
"""Where the whole weights are sent in less, nothing else is tried: a delta takes host memory on the trainer."""
TRY_AGAIN_AFTER = 50
"""Publications of whole weights after which deltas are tried again, where they were slower."""


@dataclass
class PathChoice:
    """The choice for one content, learned from the seconds of each transfer. Links change, and so does the number of
    elements that a step changes: always the last seconds count."""

    whole_s: float | None = None
    """Seconds of the last transfer of whole weights."""
    delta_s: float | None = None
    """Seconds of the last transfer of changes; None before the first."""
    since: int = 0
    """Transfers of whole weights since deltas were found to be slower."""

    @property
    def delta(self) -> bool:
        """Whether the next publication sends changes. The first that does still sends everything, and keeps it."""
        if self.whole_s is None or self.whole_s < WORTH_S:
            return False
        return self.delta_s is None or self.delta_s < self.whole_s or self.since >= TRY_AGAIN_AFTER

    def learn(self, transfer_s: float, *, whole: bool) -> None:
        """A transfer is over; `whole`: it sent everything."""
        if whole:
            self.whole_s = transfer_s
            self.since += 1
        else:
            self.delta_s = transfer_s
            self.since = 0
