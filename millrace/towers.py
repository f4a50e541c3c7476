"""The tower of a model that takes images: its sizes, parameters, FLOPs and memory, by the patches of an image.
Torch-free."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "temporal_patch_size": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
}
"""Sizes of a tower of Qwen2.5-VL that its config leaves out, as transformers has them."""
FULL_LAYERS = (7, 15, 23, 31)
"""Layers that attend to the whole image, if its config does not say."""
MOST_PIXELS = 28 * 28 * 1280
"""Of an image as the processor makes it, if the processor's file does not say."""
MOST_KEPT = 256 << 20
"""Bytes of features of images that a rank keeps: passes and samples of a step have the same ones."""
FLOAT32 = 4


@dataclass(frozen=True)
class TowerShape:
    """The sizes of a tower of Qwen2.5-VL: layers of norms, attention and a gated MLP, and a merger that makes a token
    of a square of patches. All but some layers attend within windows."""

    depth: int
    hidden: int
    ffn: int
    heads: int
    values: int
    """Numbers of a patch as the processor makes it."""
    merge: int
    """Patches on a side of the square that becomes one token."""
    out: int
    window: int
    """Patches on a side of a window."""
    full: int
    """Layers that attend to the whole image."""
    most_patches: int
    """Of one image, as the processor makes it."""

    @classmethod
    def of_config(cls, vision: Mapping[str, Any], processor: Mapping[str, Any]) -> Self:
        """From the config's entry `vision_config` and the processor's file, which may be empty. Raises TypeError or
        ValueError for entries of another type."""
        sizes = {**DEFAULTS, **vision}
        patch, merge = int(sizes["patch_size"]), int(sizes["spatial_merge_size"])
        stated = (processor.get("size") or {}).get("longest_edge") or processor.get("max_pixels")
        chosen, depth = sizes.get("fullatt_block_indexes", FULL_LAYERS), int(sizes["depth"])
        return cls(
            depth,
            int(sizes["hidden_size"]),
            int(sizes["intermediate_size"]),
            int(sizes["num_heads"]),
            int(sizes["in_channels"]) * int(sizes["temporal_patch_size"]) * patch**2,
            merge,
            int(sizes["out_hidden_size"]),
            int(sizes["window_size"]) // merge // patch * merge,
            sum(0 <= int(layer) < depth for layer in chosen),
            int(stated or MOST_PIXELS) // patch**2,
        )

    @property
    def parameters(self) -> int:
        """Each layer has two norms, attention and a gated MLP, both with biases."""
        layer = 2 * self.hidden + self._attention + 4 * self.hidden + self._mlp + 2 * self.ffn + self.hidden
        merged = self.hidden * self.merge**2
        return self.values * self.hidden + self.depth * layer + self.hidden + self._merger + merged + self.out

    def flops(self, grid: tuple[int, int, int]) -> float:
        """FLOPs of the forward pass for an image of so many patches by time, height and width. Patches of one time
        attend to each other, in most layers within windows, of which those at the borders are smaller."""
        times, high, wide = grid
        patches, frame = times * high * wide, high * wide
        pairs = self.full * frame**2 + (self.depth - self.full) * self._squares(high) * self._squares(wide)
        products = patches * (self.values * self.hidden + self.depth * (self._attention + self._mlp))
        return 2.0 * (products + patches / self.merge**2 * self._merger + 2 * self.hidden * times * pairs)

    def flops_of_tokens(self, tokens: float) -> float:
        """FLOPs of the forward pass for one square image that makes so many tokens, or for several of its size that
        make a multiple."""
        side = self.merge * max(1, round(math.sqrt(tokens)))
        return self.flops((1, side, side)) * tokens * self.merge**2 / side**2

    def working_bytes(self, patches: int, element: int) -> float:
        """Most bytes that a forward pass without gradient has at a time, for an image of so many patches. `element`:
        bytes of an element of the pass.

        What came in, the hidden states and the angles of positions are there all the time; in a layer either attention,
        whose queries and keys are turned in float32, or the MLP comes on top.
        """
        angles = 2 * FLOAT32 * self.hidden / self.heads
        turned = FLOAT32 * self.hidden * (1 if element == FLOAT32 else 2)
        attention = element * 5 * self.hidden + 4 * FLOAT32 * self.hidden + turned
        mlp = element * (3 * self.hidden + 3 * self.ffn)
        return patches * (element * self.values + angles + max(attention, mlp))

    @property
    def _attention(self) -> int:
        return 4 * self.hidden**2

    @property
    def _mlp(self) -> int:
        return 3 * self.hidden * self.ffn

    @property
    def _merger(self) -> int:
        merged = self.hidden * self.merge**2
        return merged * (merged + self.out)

    def _squares(self, side: int) -> int:
        """Sum of the squares of the windows' sides along an image's side."""
        whole, rest = divmod(side, self.window)
        return whole * self.window**2 + rest**2
