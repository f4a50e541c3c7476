"""Frees models that nothing uses any more."""

import gc

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
