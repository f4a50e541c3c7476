"""Tensors that an engine computes from its parameters after loading and keeps: every version changes them too.

Attention on latents (DeepSeek-V2 and later models) decodes with the up-projection of keys and values folded into
queries and outputs. vLLM keeps W_UK_T and W_UV next to `kv_b_proj`: in some releases they are views of it, which change
with it; in others they are copies. SGLang's models compute w_kc and w_vc in a method of their own, in place. Captured
CUDA graphs contain the copies' addresses, so vLLM's copies are written in place here.
"""

from collections.abc import Iterator
from typing import Any

import torch

NAMES = ("W_UK_T", "W_UV", "W_UK_T_dcp_qrep")


class DerivedTensors:
    """The derived tensors of one model."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """`model` is a torch module that its engine has loaded for `dtype`."""
        self._dtype = dtype
        self._recompute = getattr(model, "post_load_weights", None)
        modules = [(path, module) for path, module in model.named_modules() if any(_derived_of(module))]
        self.names = frozenset(f"{path}.{name}" for path, module in modules for name, _ in _derived_of(module))
        """Their names among the model's parameters, where they are parameters."""
        loaded = {_storage(p) for name, p in model.named_parameters() if name not in self.names}
        self._copies = [m for _, m in modules if any(_storage(tensor) not in loaded for _, tensor in _derived_of(m))]

    def update(self) -> None:
        """Computes them from the parameters as they are now. Only while generation is paused."""
        with torch.no_grad():
            for module in self._copies:
                before = list(_derived_of(module))
                module.process_weights_after_loading(self._dtype)
                for name, tensor in before:
                    if (now := getattr(module, name)).data_ptr() != tensor.data_ptr():
                        tensor.copy_(now)
                        setattr(module, name, tensor)
            if self._recompute is not None:
                self._recompute()


def _derived_of(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in NAMES:
        if isinstance(tensor := getattr(module, name, None), torch.Tensor):
            yield name, tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
