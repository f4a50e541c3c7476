"""What tests ask of processes."""

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended. One that ended and that nobody has waited for yet does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
