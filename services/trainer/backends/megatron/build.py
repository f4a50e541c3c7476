"""Builds the megatron backend of a job: process groups, policy, and the critic of a job that has one."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from millrace.backends.megatron import MegatronOptions, Recompute, parse
from millrace.megatron.architectures import read_shape
from millrace.megatron.rules import check
from millrace.megatron.topology import Topology
from millrace.spec import JobSpec
from services.trainer.backends.megatron.backend import MegatronBackend, ModelSetup
from services.trainer.backends.megatron.critic import build_critic
from services.trainer.backends.megatron.model.layers import layers
from services.trainer.backends.megatron.parallel import process_groups
from services.trainer.ranks import collectives

COLLECTIVE = timedelta(hours=24)
"""Limit of a collective, as a last resort only: the same as `services.trainer.ranks.world.COLLECTIVE_S`."""


def build(spec: JobSpec, device: torch.device) -> MegatronBackend:
    """The backend with its models loaded. Raises InvalidJob, on every rank, for a model or options that it cannot
    run."""
    with collectives.fail_together():
        options = _options(spec)
        shape = read_shape(Path(spec.model.path))
        check(options, shape, dist.get_world_size(), cuda=device.type == "cuda")
        adapter = None
        if spec.model.lora is not None:
            from services.trainer.backends.megatron.adapters.plan import AdapterPlan  # importing PEFT takes seconds

            adapter = AdapterPlan.of(spec.model.lora, shape, layers(), options, spec.trainer.seed)
    topology = Topology(dist.get_world_size(), options)
    process_groups.initialize(topology, seed=spec.trainer.seed, timeout=COLLECTIVE)
    setup = ModelSetup(shape, topology, device, adapter)
    backend = MegatronBackend(spec, setup)
    if spec.algorithm.critic is not None:
        as_critic = spec.model_copy(update={"trainer": spec.trainer.of("critic")})
        own = replace(setup, topology=replace(topology, options=_options(as_critic)))
        backend.critic = build_critic(as_critic, own)
    return backend


def _options(spec: JobSpec) -> MegatronOptions:
    """The job's options. `trainer.activation_recompute` means full recomputation where they do not say how."""
    options = parse(spec.trainer.backend_options)
    if spec.trainer.activation_recompute and options.recompute.granularity == "none":
        options = options.model_copy(update={"recompute": Recompute(granularity="full")})
    return options
