"""Whether DeepEP, which sends tokens to the experts on other GPUs, can be used here: docs/megatron.md has its build."""

import functools

TESTED = "1.2.1"
"""The last release whose `Buffer` Megatron-Core 0.16 calls."""


@functools.cache
def obstacle() -> str | None:
    """Why DeepEP cannot be used in this process; None where it can. Imports torch, and DeepEP where there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability()[0] < 9:
        return "its kernels need a Hopper GPU or a newer one"
    try:
        from deep_ep import Buffer  # noqa: F401
        from deep_ep.utils import EventHandle, EventOverlap  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "deep_ep":
            return "deep_ep is not installed"
        return f"deep_ep cannot be loaded: {error}"
    except ImportError as error:  # built for another torch, or another package of that name
        return f"deep_ep cannot be loaded: {error}"
    return None
