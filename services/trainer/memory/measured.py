"""The bytes of the tensors that a rank keeps, by part: exact, by their storages."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from millrace.memory.ledger import Ledger, Part
from services.trainer.protocol.backend import Backend

HeldTensors = Mapping[Part, Sequence[Tensor]]
"""Tensors by part. A tensor in two parts counts for the first one."""


def measured(backend: Backend) -> Ledger:
    """Bytes of what this rank keeps now for policy, reference and critic, on its device and in host memory."""
    held: dict[Part, list[Tensor]] = {part: list(tensors) for part, tensors in backend.held().items()}
    if backend.critic is not None:
        held[Part.CRITIC] = [tensor for tensors in backend.critic.held().values() for tensor in tensors]
    return of_tensors(held, backend.device)


def of_tensors(held: HeldTensors, device: torch.device) -> Ledger:
    """Bytes of the storages of these tensors. A storage counts once. Where the device is a CPU, host memory is its
    memory."""
    seen: set[tuple[str, int]] = set()
    on_device, on_host = dict.fromkeys(held, 0.0), dict.fromkeys(held, 0.0)
    for part, tensors in held.items():
        for storage in _storages(tensors):
            key = (storage.device.type, storage.data_ptr())
            if not storage.nbytes() or key in seen:
                continue
            seen.add(key)
            place = on_device if storage.device.type == device.type else on_host
            place[part] += storage.nbytes()
    return Ledger(on_device, {part: size for part, size in on_host.items() if size})


def _storages(tensors: Iterable[Tensor]) -> Iterable[torch.UntypedStorage]:
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        yield local.detach().untyped_storage()
