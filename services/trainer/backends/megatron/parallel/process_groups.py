"""The process groups of every parallel dimension, which are created for every job."""

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from millrace.errors import InvalidState
from millrace.megatron.topology import Topology
from services.trainer.backends.megatron.cpu.megatron_calls import patch_megatron


def initialize(topology: Topology, *, seed: int, timeout: timedelta) -> None:
    """Creates the groups, and ends those of an earlier job. A collective, after torch.distributed is initialized.

    Raises InvalidState where the number of ranks is not that of the topology.
    """
    if dist.get_world_size() != topology.world_size:
        raise InvalidState(
            f"the topology is for {topology.world_size} ranks, the trainer has {dist.get_world_size()}.",
            "build the topology from the trainer's world size.",
        )
    patch_megatron()
    _end()
    options = topology.options
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline if options.virtual_pipeline > 1 else None,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=options.expert_tensor_size,
        distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _end() -> None:
    """Destroys the groups of an earlier job: Megatron only forgets them, and each would keep its threads and
    connections as long as the rank lives."""
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)
