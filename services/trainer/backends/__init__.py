"""The training backends: one folder each, and one descriptor in `millrace/backends`."""

import torch

from millrace.backends import BACKENDS
from millrace.descriptors import imported
from millrace.spec import JobSpec
from services.trainer.protocol.backend import Backend


def build(spec: JobSpec, device: torch.device) -> Backend:
    """The job's backend with its model loaded. Raises InvalidJob for a model or options that it cannot run."""
    backend: Backend = imported(BACKENDS[spec.trainer.backend].build)(spec, device)
    return backend
