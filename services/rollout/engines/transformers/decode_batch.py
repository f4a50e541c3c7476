"""The batch of a decode loop: left-padded keys and values of sequences that join and leave between tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.errors import refused


class Routing:
    """Records the choices of every layer with experts."""

    def __init__(self, model: Any) -> None:
        """Raises InvalidJob if the model has no module named `experts`."""
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


PREFILL_TOKENS = 8192
"""Tokens in one forward pass of a prefill, padding included."""


class DecodeBatch:
    """Rows in the order in which they were added. `model` is a Hugging Face causal language model."""

    def __init__(self, model: Any, routing: Routing | None = None) -> None:
        self.experts: list[NDArray[np.integer]] = []
        """The experts of the tokens that the last `add` or `step` appended, by row; only with `routing`."""
        self._model = model
        self._routing = routing
        self._cache: Any = None
        self._valid_bl = torch.zeros(0, 0, dtype=torch.long, device=model.device)
        """[rows, columns of the cache]: 1 if a column holds a token of the row, 0 in the padding on its left."""

    def __len__(self) -> int:
        return len(self._valid_bl)

    def add(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Appends rows for whole sequences. The logits of the next token, [rows, V]."""
        logits, experts = [], []
        for part in _parts(sequences):
            longest = max(map(len, part))
            ids = torch.tensor([[0] * (longest - len(s)) + list(s) for s in part], device=self._model.device)
            valid = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in part], device=self._model.device)
            cache, part_logits = self._forward(ids, valid, None)
            logits.append(part_logits)
            experts += self.experts
            self._join(cache, valid)
        self.experts = experts
        return torch.cat(logits)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Appends one token to each row. The logits of the next token, [rows, V]."""
        valid = torch.cat([self._valid_bl, self._valid_bl.new_ones(len(self), 1)], 1)
        ids = torch.tensor(tokens, device=self._model.device)[:, None]
        self._cache, logits = self._forward(ids, valid, self._cache)
        self._valid_bl = valid
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all rows except these, and columns that hold only padding then."""
        if len(rows) == len(self):
            return
        if not rows:
            self._cache, self._valid_bl = None, self._valid_bl[:0]
            return
        index = torch.tensor(rows, device=self._model.device)
        self._valid_bl = self._valid_bl[index]
        empty = int(self._valid_bl.argmax(1).min())
        self._valid_bl = self._valid_bl[:, empty:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[index][:, :, empty:], layer.values[index][:, :, empty:]

    def _forward(self, ids_bt: torch.Tensor, valid_bl: torch.Tensor, cache: Any) -> tuple[Any, torch.Tensor]:
        from transformers import DynamicCache

        positions_bt = (valid_bl.cumsum(-1) - 1).clamp(min=0)[:, -ids_bt.shape[1] :]
        with torch.inference_mode():
            output = self._model(
                input_ids=ids_bt,
                attention_mask=valid_bl,
                position_ids=positions_bt,
                past_key_values=DynamicCache() if cache is None else cache,
                use_cache=True,
                logits_to_keep=1,
            )
        if self._routing is not None:
            self.experts = self._routing.taken(valid_bl[:, -ids_bt.shape[1] :])
        return output.past_key_values, output.logits[:, -1]

    def _join(self, cache: Any, valid_bl: torch.Tensor) -> None:
        if self._cache is None:
            self._cache, self._valid_bl = cache, valid_bl
            return
        length = max(self._valid_bl.shape[1], valid_bl.shape[1])
        self._valid_bl = torch.cat([_widened(self._valid_bl, length, 1), _widened(valid_bl, length, 1)])
        for held, added in zip(self._cache.layers, cache.layers, strict=True):
            held.keys = torch.cat([_widened(held.keys, length, 2), _widened(added.keys, length, 2)])
            held.values = torch.cat([_widened(held.values, length, 2), _widened(added.values, length, 2)])


def _widened(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """`tensor` with zeros before it in dimension `dim`, up to `length`."""
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim)


def _parts(sequences: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Groups of consecutive sequences, each with as many as fit PREFILL_TOKENS when padded to their longest."""
    parts: list[list[Sequence[int]]] = []
    for sequence in sequences:
        if parts and max(*map(len, parts[-1]), len(sequence)) * (len(parts[-1]) + 1) <= PREFILL_TOKENS:
            parts[-1].append(sequence)
        else:
            parts.append([sequence])
    return parts
