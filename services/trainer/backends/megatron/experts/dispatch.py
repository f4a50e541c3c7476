"""The choice of the dispatcher that sends tokens to the experts: DeepEP where it works, else all-to-all."""

import structlog
import torch

from millrace.backends.megatron import MegatronOptions
from millrace.errors import refused
from millrace.megatron.deepep import obstacle as deepep_obstacle

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
