"""A step with several updates is written whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from millrace.errors import NonFinite
from services.trainer.backends import Backend


@contextmanager
def all_or_nothing(backend: Backend, *, needed: bool) -> Iterator[None]:
    """Where what is inside raises NonFinite, model and optimizer are what they were before. Keeps a copy of this rank's
    shards in host memory if `needed`: if more than one update may be made inside."""
    updates = backend.updates
    kept = {name: _local(tensor).to("cpu", copy=True) for name, tensor in backend.state().items()} if needed else {}
    try:
        yield
    except NonFinite:
        if needed and backend.updates != updates:
            with torch.no_grad():
                for name, tensor in backend.prepare_state(updates).items():
                    _local(tensor).copy_(kept[name])
        raise


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
