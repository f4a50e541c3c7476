"""A step with several updates is written whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from millrace.errors import NonFinite
from services.trainer.backends import Backend, Trained, models
from services.trainer.boxes import Offset, parts


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
                        for offset, part in parts(tensor).items():
                            part.copy_(copy[name][offset])
        raise


def _copy(model: Trained) -> dict[str, dict[Offset, Tensor]]:
    return {
        name: {offset: part.to("cpu", copy=True) for offset, part in parts(tensor).items()}
        for name, tensor in model.state().items()
    }
