"""A step with several updates is written whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from millrace.errors import NonFinite
from services.trainer.backends import Backend, Trained, models


@contextmanager
def all_or_nothing(backend: Backend, *, needed: bool) -> Iterator[None]:
    """Where what is inside raises NonFinite, models and optimizers are what they were before. Keeps a copy of this
    rank's shards in host memory if `needed`: if more than one update may be made inside."""
    kept = [(model, model.updates, _copy(model)) for model in models(backend).values()] if needed else []
    try:
        yield
    except NonFinite:
        for model, updates, copy in kept:
            if model.updates != updates:
                with torch.no_grad():
                    for name, tensor in model.prepare_state(updates).items():
                        _local(tensor).copy_(copy[name])
        raise


def _copy(model: Trained) -> dict[str, Tensor]:
    return {name: _local(tensor).to("cpu", copy=True) for name, tensor in model.state().items()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
