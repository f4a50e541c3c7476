"""The choice of the dispatcher that sends tokens to the experts: DeepEP where it works, else all-to-all."""

import functools
import importlib.util

import structlog
import torch

from millrace.backends.megatron import MegatronOptions
from millrace.errors import refused

log = structlog.get_logger(__name__)


def dispatcher(options: MegatronOptions) -> str:
    """`deepep` or `alltoall`. Raises InvalidJob where DeepEP is asked for and not available."""
    if options.experts.dispatcher == "alltoall" or options.expert_parallel == 1:
        return "alltoall"
    obstacle = deepep_obstacle()
    if obstacle is None:
        return "deepep"
    if options.experts.dispatcher == "deepep":
        raise refused("trainer.backend_options.experts.dispatcher", "deepep", obstacle, "set it to auto.")
    if torch.cuda.is_available():
        log.warning("experts are dispatched by all-to-all", reason=obstacle)
    return "alltoall"


@functools.cache
def deepep_obstacle() -> str | None:
    """Why DeepEP cannot be used here; None where it can."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability()[0] < 9:
        return "its kernels need a Hopper GPU or a newer one"
    if importlib.util.find_spec("deep_ep") is None:
        return "deep_ep is not installed"
    try:
        import deep_ep  # noqa: F401
    except ImportError as error:  # built for another torch
        return f"deep_ep cannot be loaded: {error}"
    return None
