"""Activations in host memory between the forward and the backward pass of a micro-batch.

What a layer saves for the backward pass is copied to host memory on a stream of its own, while the device computes the
next layer. It comes back on the same stream one layer before the backward pass needs it. So the device holds what two
layers saved, and no computation waits for a copy as long as a copy takes less time than a layer.

`torch.autograd.graph.save_on_cpu` and the `offload` of transformers' checkpointing make the same copies on the stream
that computes, one after the other. On a CPU the copies are plain ones, and all else is the same.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

SMALLEST_BYTES = 1 << 20
"""Smallest storage that is copied to host memory. A copy of less costs more than its memory is worth."""


class _Copies:
    """Copies between the device and host memory, in order, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, target_b: Tensor, source_b: Tensor, on_device: Tensor) -> torch.cuda.Event | None:
        """Copies the bytes, and returns what to wait for. `on_device` is the one of the two tensors that lies on the
        device: its memory is not used again before the copy is done."""
        if self._stream is None:
            target_b.copy_(source_b)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target_b.copy_(source_b, non_blocking=True)
            on_device.record_stream(self._stream)
            done: torch.cuda.Event = self._stream.record_event()
        return done

    def wait(self, done: torch.cuda.Event | None) -> None:
        """What is computed from now on begins after that copy. The host does not wait."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)


class _SavedStorage:
    """One storage that the forward pass saved: all tensors that are views of it share the copy."""

    def __init__(self, storage: torch.UntypedStorage, copies: _Copies) -> None:
        self.uses = 0
        """Saved tensors whose backward has not asked for them."""
        self._copies = copies
        self._device_b: Tensor | None = _bytes(storage, copies.device)
        pinned = copies.device.type == "cuda"
        self._host_b = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        self._copied = copies.start(self._host_b, self._device_b, self._device_b)

    def leave_device(self) -> None:
        """Frees the memory on the device once it has been copied."""
        if self._device_b is not None:
            self._copies.wait(self._copied)
            self._device_b = None

    def fetch(self) -> None:
        """Starts the copy back to the device."""
        if self._device_b is None:
            self._device_b = torch.empty(self._host_b.shape, dtype=torch.uint8, device=self._copies.device)
            self._copied = self._copies.start(self._device_b, self._host_b, self._device_b)

    def use(self) -> torch.UntypedStorage:
        """The storage on the device, for one of the saved tensors. Nothing is kept there after the last."""
        self.fetch()
        assert self._device_b is not None
        self._copies.wait(self._copied)
        storage = self._device_b.untyped_storage()
        self.uses -= 1
        if self.uses <= 0:
            self._device_b = None
        return storage


@dataclass
class _ForwardPass:
    """What one forward pass has saved, layer by layer."""

    layers: list[list[_SavedStorage]] = field(default_factory=lambda: [[]])
    on_device: dict[tuple[int, int], _SavedStorage] = field(default_factory=dict)
    """The storages that are still on the device, by the address of torch's object, which is unique as long as they are,
    and the number of changes in place."""

    def enter_layer(self) -> None:
        """Begins a new layer. The device keeps what the layer before it saved: its copies may still be under way."""
        if len(self.layers) > 1:
            left = self.layers[-2]
            for saved in left:
                saved.leave_device()
            self.on_device = {key: saved for key, saved in self.on_device.items() if saved not in left}
        self.layers.append([])

    def fetch(self, layer: int) -> None:
        """Has the layer's storages, and those of the layer before it, copied to the device."""
        for saved in (*self.layers[layer], *(self.layers[layer - 1] if layer else ())):
            if saved.uses > 0:
                saved.fetch()


@dataclass(frozen=True)
class _SavedTensor:
    """A saved tensor as a view of its storage."""

    storage: _SavedStorage
    forward: _ForwardPass
    layer: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class ActivationOffload:
    """Keeps what the forward pass of one module saves in host memory until its backward pass."""

    def __init__(self, device: torch.device) -> None:
        self._copies = _Copies(device)
        self._forward = _ForwardPass()
        self._weights: set[int] = set()
        self._saving = False

    def forget(self) -> None:
        """Frees what a forward pass has saved whose backward pass does not come."""
        self._forward = _ForwardPass()

    def install(self, module: Any, layers: Iterable[nn.Module]) -> None:
        """Every later forward pass of the module with gradients is offloaded. `layers` are its parts that run one after
        the other. In a module sharded by FSDP they are what is gathered as a unit."""
        own = module.forward

        def forward(*arguments: Any, **named: Any) -> Any:
            with self._saved(module):
                return own(*arguments, **named)

        module.forward = forward
        for layer in layers:
            layer.register_forward_pre_hook(self._enter_layer)

    @contextmanager
    def _saved(self, module: nn.Module) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        self._forward, self._saving, self._weights = _ForwardPass(), True, set()
        self._know_weights(module)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._saving = False

    def _enter_layer(self, layer: nn.Module, _: Any) -> None:
        if self._saving:  # with recomputation the layer runs in the backward pass, too
            self._forward.enter_layer()
            self._know_weights(layer)

    def _know_weights(self, module: nn.Module) -> None:
        """Notes the parameters, which are gathered anew for the backward pass and so never copied. What FSDP has not
        gathered is of another type than what a forward pass saves."""
        gathered = (each for each in module.parameters() if type(each) is Parameter)
        self._weights |= {each.untyped_storage()._cdata for each in gathered}

    def _pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        if type(tensor) not in (Tensor, Parameter) or tensor.device.type != self._copies.device.type:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_BYTES or storage._cdata in self._weights:
            return tensor
        forward, key = self._forward, (storage._cdata, tensor._version)
        saved = forward.on_device.get(key)
        if saved is None:
            saved = forward.on_device[key] = _SavedStorage(storage, self._copies)
            forward.layers[-1].append(saved)
        saved.uses += 1
        offset, layer = int(tensor.storage_offset()), len(forward.layers) - 1
        return _SavedTensor(saved, forward, layer, tensor.dtype, offset, tensor.shape, tensor.stride())

    def _unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        saved.forward.fetch(saved.layer)
        view = torch.empty(0, dtype=saved.dtype, device=self._copies.device)
        return view.set_(saved.storage.use(), saved.offset, saved.size, saved.stride)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
