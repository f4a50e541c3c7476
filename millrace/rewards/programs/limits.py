"""The limits under which a scoring process calls its functions, for a function that divides them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CallLimits:
    """Fields of the job's `reward`."""

    timeout_s: float = 30.0
    """Seconds of a call, after which the process is killed."""
    memory_mb: int = 2048
    """Memory of the process and of all that it starts."""

    @property
    def budget_s(self) -> float:
        """Seconds that a function may plan with, so that it answers in time."""
        return max(0.8 * self.timeout_s, self.timeout_s - 5.0)


_held = CallLimits()


def set_for_process(limits: CallLimits) -> None:
    """Makes them the limits of this process."""
    global _held
    _held = limits


def of_process() -> CallLimits:
    """The limits of this process; the defaults of a job if none were set."""
    return _held
