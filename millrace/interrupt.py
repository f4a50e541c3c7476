"""Ctrl-C while a command is still importing: the command ends at once, without a traceback.

A KeyboardInterrupt would come out of whichever import is going on, as a traceback or as an error of that package.
Nothing that would have to be cleaned up has begun by then.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

STATUS = 128 + signal.SIGINT
"""Exit status of a program that Ctrl-C ended, as shells give it."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """SIGINT ends the process inside of this, unless it is ignored or somebody has a handler. Only for the main
    thread."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(STATUS))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
