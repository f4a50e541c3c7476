"""The training backends, one folder each, and one line in `BACKENDS`."""

from importlib import import_module

import torch

from millrace.errors import InvalidJob
from millrace.spec import JobSpec
from services.trainer.protocol.backend import Backend

BACKENDS: dict[str, str] = {
    "fsdp2": "services.trainer.backends.fsdp2.backend:build",
    "megatron": "services.trainer.backends.megatron.backend:build",
}
"""Where each backend's `build(spec: JobSpec, device: torch.device) -> Backend` is."""


def build(spec: JobSpec, device: torch.device) -> Backend:
    """The job's backend with its model loaded. Raises InvalidJob for a model or options that it cannot run."""
    name = spec.trainer.backend
    if name not in BACKENDS:
        raise InvalidJob(f"trainer.backend: there is no backend {name!r}.", f"choose one of {', '.join(BACKENDS)}.")
    module, function = BACKENDS[name].split(":")
    return getattr(import_module(module), function)(spec, device)
