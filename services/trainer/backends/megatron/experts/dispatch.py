"""The choice of the dispatcher that sends tokens to the experts: DeepEP where it works, else all-to-all."""

import structlog
import torch

from millrace.backends.megatron import MegatronOptions
from millrace.errors import refused
from millrace.megatron.deepep import obstacle as deepep_obstacle
from millrace.rank_groups import Hosts

log = structlog.get_logger(__name__)


def dispatcher(options: MegatronOptions, hosts: Hosts) -> str:
    """`deepep` or `alltoall`, for ranks that lie on `hosts`. Across hosts DeepEP was never run, so `auto` does not take
    it there. Raises InvalidJob where DeepEP is asked for and not available."""
    asked, across = options.experts.dispatcher, hosts.cross(options.expert_parallel, options.expert_tensor_size)
    if asked == "alltoall" or options.expert_parallel == 1:
        return "alltoall"
    obstacle = "expert_parallel crosses hosts" if asked == "auto" and across else deepep_obstacle()
    if obstacle is None:
        return "deepep"
    if options.experts.dispatcher == "deepep":
        raise refused("trainer.backend_options.experts.dispatcher", "deepep", obstacle, "set it to auto.")
    if torch.cuda.is_available():
        log.warning("experts are dispatched by all-to-all", reason=obstacle)
    return "alltoall"
