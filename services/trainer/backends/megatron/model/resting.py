"""The parameters of a model in host memory while the model is not used."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class RestingParameters:
    """The parameters and buffers of chunks, which can be moved to host memory and back. The tensors stay the same, and
    so do their views: only the memory below them is freed and allocated again, so its address may be another
    afterwards."""

    def __init__(self, chunks: Iterable[nn.Module]) -> None:
        tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        self._storages: dict[int, Any] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage
        self._copies: dict[int, torch.Tensor] = {}
        """Host memory for each storage, which is kept for the next time."""
        self._resting = False

    @property
    def host_copies(self) -> list[torch.Tensor]:
        """The host memory that is kept for them."""
        return list(self._copies.values())

    def rest(self) -> None:
        """Moves the parameters to host memory."""
        if self._resting:
            return
        self._resting = True
        for key, storage in self._storages.items():
            on_device = _bytes(storage)
            if key not in self._copies:
                self._copies[key] = torch.empty(on_device.shape, dtype=torch.uint8, pin_memory=on_device.is_cuda)
            self._copies[key].copy_(on_device, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the memory must not be used again before it is copied
        for storage in self._storages.values():
            storage.resize_(0)

    def wake(self) -> None:
        """Moves them back."""
        if not self._resting:
            return
        self._resting = False
        for key, storage in self._storages.items():
            storage.resize_(self._copies[key].numel())
            _bytes(storage).copy_(self._copies[key], non_blocking=True)


def _bytes(storage: Any) -> torch.Tensor:
    """All of a storage as a tensor, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
