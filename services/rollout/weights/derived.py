"""What an engine computes from its parameters when it has loaded them, and keeps: it has to follow every version.

Attention on latents (DeepSeek-V2 and what came after it) decodes with the up-projection of keys and values folded into
queries and outputs. vLLM's W_UK_T and W_UV lie beside `kv_b_proj`: some releases make them views of it, which follow by
themselves; some make copies. SGLang's models make w_kc and w_vc in a method of their own. Captured CUDA graphs know the
copies' addresses, so they are written where they are; SGLang does so by itself.
"""

from collections.abc import Iterator
from typing import Any

import torch

NAMES = ("W_UK_T", "W_UV", "W_UK_T_dcp_qrep")


class Derived:
    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Of a model that its engine has loaded."""
        self._dtype = dtype
        self._again = getattr(model, "post_load_weights", None)
        modules = [(path, module) for path, module in model.named_modules() if any(_held(module))]
        self.names = frozenset(f"{path}.{name}" for path, module in modules for name, _ in _held(module))
        """As they are called where they count as parameters."""
        loaded = {_storage(p) for name, p in model.named_parameters() if name not in self.names}
        self._copies = [m for _, m in modules if any(_storage(tensor) not in loaded for _, tensor in _held(m))]

    def follow(self) -> None:
        """Computes them from the parameters as they are now. Only while generation is paused."""
        with torch.no_grad():
            for module in self._copies:
                before = list(_held(module))
                module.process_weights_after_loading(self._dtype)
                for name, tensor in before:
                    if (now := getattr(module, name)).data_ptr() != tensor.data_ptr():
                        tensor.copy_(now)
                        setattr(module, name, tensor)
            if self._again is not None:
                self._again()


def _held(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in NAMES:
        if isinstance(tensor := getattr(module, name, None), torch.Tensor):
            yield name, tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
