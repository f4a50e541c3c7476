"""The experts that a Hugging Face model's routers choose, recorded where its experts are called."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.errors import refused


class Routing:
    """Records the choices of every layer with experts."""

    def __init__(self, model: Any) -> None:
        """Raises InvalidJob where the model has no module named `experts`."""
        self._chosen: list[torch.Tensor] = []
        experts = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
        if not experts:
            raise refused("algorithm.router_replay", True, "the model has no experts", "leave it out.")
        for module in experts:
            module.register_forward_pre_hook(self._record)

    def _record(self, experts: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        _, chosen, *_ = inputs
        self._chosen.append(chosen)

    def taken(self, valid_bt: torch.Tensor) -> list[NDArray[np.integer]]:
        """The choices of the forward pass that has just ended, by row: [its valid tokens, layers, experts a token]."""
        chosen_btlk = torch.stack([c.view(*valid_bt.shape, -1) for c in self._chosen], dim=2).cpu().numpy()
        self._chosen = []
        kept = chosen_btlk.astype(np.uint16 if chosen_btlk.max(initial=0) > 255 else np.uint8)
        return [row[valid] for row, valid in zip(kept, valid_bt.bool().cpu().numpy(), strict=True)]
