"""Builds the megatron backend of a job: the process groups of every parallel dimension, the policy, and the critic
of a job that has one."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from millrace.backends.megatron import MegatronOptions, Recompute, parse
from millrace.data.pictures import Pictures
from millrace.errors import InvalidState
from millrace.megatron.architectures import read_shape
from millrace.megatron.rules import check
from millrace.megatron.topology import Topology
from millrace.spec import JobSpec
from services.trainer.backends.megatron.adapters import AdapterPlan
from services.trainer.backends.megatron.backend import MegatronBackend, ModelSetup
from services.trainer.backends.megatron.cpu import patch_megatron
from services.trainer.backends.megatron.critic import build_critic
from services.trainer.backends.megatron.model.layers import layers
from services.trainer.backends.recurrence import check_kernels
from services.trainer.backends.tower import Images, Tower
from services.trainer.ranks import collectives


def initialize(topology: Topology, *, seed: int, timeout: timedelta) -> None:
    """Creates the groups, and ends those of an earlier job. A collective, after torch.distributed is initialized.

    Raises InvalidState if the number of ranks is not that of the topology.
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


COLLECTIVE = timedelta(hours=24)
"""Limit of a collective, as a last resort only: the same as `services.trainer.ranks.world.COLLECTIVE_S`."""


def build(spec: JobSpec, device: torch.device) -> MegatronBackend:
    """The backend with its models loaded. Raises InvalidJob, on every rank, for a model or options that it cannot
    run."""
    with collectives.fail_together():
        options = _options(spec)
        shape = read_shape(Path(spec.model.path))
        images = spec.data.images is not None
        check(options, shape, dist.get_world_size(), cuda=device.type == "cuda", images=images)
        if shape.recurrence is not None:
            check_kernels(device.type, spec.model.path, "model.path")
        adapter = None
        if spec.model.lora is not None:
            adapter = AdapterPlan.of(spec.model.lora, shape, layers(), options, spec.trainer.seed)
    topology = Topology(dist.get_world_size(), options)
    initialize(topology, seed=spec.trainer.seed, timeout=COLLECTIVE)
    with collectives.fail_together():
        setup = ModelSetup(shape, topology, device, adapter, _images(spec, device) if images else None)
    backend = MegatronBackend(spec, setup)
    if spec.algorithm.critic is not None:
        as_critic = spec.model_copy(update={"trainer": spec.trainer.of("critic")})
        own = replace(setup, topology=replace(topology, options=_options(as_critic)))
        backend.critic = build_critic(as_critic, own)
    return backend


def _images(spec: JobSpec, device: torch.device) -> Images:
    """The images of a job's prompts: on ranks of the first stage with the tower. Raises InvalidJob and InvalidState."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(spec.model.path, trust_remote_code=spec.model.trust_remote_code)
    pictures = Pictures.of_folder(spec.model.path)
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        return Tower(spec.model, config, pictures, getattr(torch, spec.trainer.dtype), device)
    return Images(spec.model, config, pictures)


def _options(spec: JobSpec) -> MegatronOptions:
    """The job's options. `trainer.activation_recompute` means full recomputation if they do not say how."""
    options = parse(spec.trainer.backend_options)
    if spec.trainer.activation_recompute and options.recompute.granularity == "none":
        options = options.model_copy(update={"recompute": Recompute(granularity="full")})
    return options
