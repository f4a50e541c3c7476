"""Frees models that nothing uses any more, and what was compiled for them."""

import gc
import sys

import torch

PASSES = 4


def free_unreachable(device: torch.device) -> None:
    """Frees what only reference cycles hold, and gives it back to the device.

    One pass of the collector does not see a cycle through an autograd node that has a second owner in C++ (torch's
    `THPCppFunction` tells its hooks only where it is the only owner): such a model goes in the pass after the one that
    frees the other owner.
    """
    for _ in range(PASSES):
        if not gc.collect():
            break
    if device.type == "cuda":
        torch.cuda.empty_cache()


def forget_models(device: torch.device) -> None:
    """Frees the models of a job that has ended. The code that was compiled for their layers goes too: torch compiles a
    layer's class for at most eight kinds of input and runs it uncompiled after that, over all jobs of a process."""
    if "torch._dynamo" in sys.modules:  # nothing was compiled otherwise, and the import takes seconds
        torch.compiler.reset()
    free_unreachable(device)
