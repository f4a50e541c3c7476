"""The tower of a model that takes images: its sizes, parameters, FLOPs and memory, by the patches of an image.
Torch-free."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

DEFAULTS: Mapping[str, Any] = {
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
NEWER = ("qwen3_vl", "qwen3_5")
"""The model types of towers without windows begin so."""
NO_FEATURES_OF_LAYERS = "qwen3_5"
"""The model types of those that make no features for the first decoder layers begin so."""
DEFAULTS_OF_NEWER: Mapping[str, Any] = {
    **DEFAULTS,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
"""Sizes of a tower of Qwen3-VL or Qwen3.5 that its config leaves out."""
FULL_LAYERS = (7, 15, 23, 31)
"""Layers that attend to the whole image, if its config does not say."""
MOST_PIXELS = 28 * 28 * 1280
"""The most pixels of an image that the processor makes, if the processor's file does not say."""
MOST_KEPT = 256 << 20
"""Bytes of features of images that a rank keeps: passes and samples of a step have the same ones."""
FLOAT32 = 4


def deepstack_layers(vision: Mapping[str, Any]) -> int:
    """The number of the first decoder layers to whose outputs a tower of Qwen3-VL adds features, by the config's entry
    `vision_config`."""
    return len({**DEFAULTS_OF_NEWER, **vision}["deepstack_visual_indexes"] or ())


@dataclass(frozen=True)
class TowerShape:
    """The sizes of a tower: layers of norms, attention and an MLP, and mergers that make a token of a square of
    patches. In Qwen2.5-VL the MLP is gated, and all but some layers attend within windows. In Qwen3-VL all layers
    attend to the whole image, positions are learned, and further mergers make features of the first decoder layers.
    Qwen3.5 has the tower of Qwen3-VL without these further mergers."""

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
    """The most patches that the processor makes of one image."""
    positions: int = 0
    """Learned positions."""
    of_layers: int | None = None
    """Mergers for the first decoder layers; None for a tower of Qwen2.5-VL."""

    @classmethod
    def of_config(cls, vision: Mapping[str, Any], processor: Mapping[str, Any]) -> Self:
        """From the config's entry `vision_config` and the processor's file, which may be empty. A config without
        `model_type` is that of Qwen2.5-VL. Raises TypeError or ValueError for entries of another type."""
        kind = str(vision.get("model_type"))
        newer = kind.startswith(NEWER)
        sizes = {**(DEFAULTS_OF_NEWER if newer else DEFAULTS), **vision}
        mergers = deepstack_layers(vision) if newer and not kind.startswith(NO_FEATURES_OF_LAYERS) else 0
        patch, merge = int(sizes["patch_size"]), int(sizes["spatial_merge_size"])
        stated = (processor.get("size") or {}).get("longest_edge") or processor.get("max_pixels")
        depth = int(sizes["depth"])
        chosen = range(depth) if newer else sizes.get("fullatt_block_indexes", FULL_LAYERS)
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
            *((int(sizes["num_position_embeddings"]), mergers) if newer else ()),
        )

    @property
    def parameters(self) -> int:
        """Each layer has two norms, attention and an MLP, both with biases."""
        merged = self.hidden * self.merge**2
        merger = self._merger + merged + self.out
        layer = self._attention + 4 * self.hidden + self._mlp + self.hidden
        whole = self.values * self.hidden + self.depth * layer + merger
        if self.of_layers is None:
            return whole + self.depth * 2 * (self.hidden + self.ffn) + self.hidden
        more = self.depth * (4 * self.hidden + self.ffn) + self.of_layers * (merger + 2 * merged)
        return whole + more + (1 + self.positions + 2) * self.hidden

    def flops(self, grid: tuple[int, int, int]) -> float:
        """FLOPs of the forward pass for an image of so many patches by time, height and width. Patches of one time
        attend to each other, in most layers within windows, of which those at the borders are smaller."""
        times, high, wide = grid
        patches, frame = times * high * wide, high * wide
        pairs = self.full * frame**2 + (self.depth - self.full) * self._squares(high) * self._squares(wide)
        products = patches * (self.values * self.hidden + self.depth * (self._attention + self._mlp))
        mergers = self._merger * (1 + (self.of_layers or 0))
        return 2.0 * (products + patches / self.merge**2 * mergers + 2 * self.hidden * times * pairs)

    def flops_of_tokens(self, tokens: float) -> float:
        """FLOPs of the forward pass for one square image that makes so many tokens, or for several of its size that
        make a multiple."""
        side = self.merge * max(1, round(math.sqrt(tokens)))
        return self.flops((1, side, side)) * tokens * self.merge**2 / side**2

    def working_bytes(self, patches: int, element: int) -> float:
        """Most bytes that a forward pass without gradient has at a time, for an image of so many patches. `element`:
        bytes of an element of the pass.

        What came in, the hidden states and the angles of positions are there all the time; in a layer either attention,
        whose queries and keys are turned in float32, or the MLP comes on top. In Qwen3-VL so are what was added for
        learned positions, and features of decoder layers.
        """
        angles = 2 * FLOAT32 * self.hidden / self.heads
        turned = FLOAT32 * self.hidden * (1 if element == FLOAT32 else 2)
        attention = element * 5 * self.hidden + 4 * FLOAT32 * self.hidden + turned
        mlp = element * (3 * self.hidden + (3 if self.of_layers is None else 2) * self.ffn)
        kept = element * self.values + angles
        if self.of_layers is not None:
            kept += FLOAT32 * self.hidden + element * self.of_layers * self.out / self.merge**2
        return patches * (kept + max(attention, mlp))

    def kept_bytes(self, patches: int, element: int, *, recompute: bool) -> float:
        """Bytes that a forward pass keeps of images of so many patches for the backward pass. `element` as in
        `working_bytes`. `recompute`: of all layers but one only the inputs.

        A layer keeps what it normalises (in Qwen2.5-VL in float32) and what that becomes, queries, keys and values
        before and after they are turned, results of attention twice, and what the MLP multiplies.
        """
        plain = self.of_layers is None
        norms = 2 * (2 * element + FLOAT32 if plain else 2 * element) * self.hidden
        layer = norms + element * (7 * self.hidden + (4 if plain else 2) * self.ffn)
        layers = self.depth * element * self.hidden + layer if recompute else self.depth * layer
        angles = 2 * FLOAT32 * self.hidden / self.heads
        mergers = element * 4 * self.hidden * (1 + (self.of_layers or 0))
        return patches * (layers + element * self.values + angles + mergers)

    @property
    def _attention(self) -> int:
        return 4 * self.hidden**2

    @property
    def _mlp(self) -> int:
        return (3 if self.of_layers is None else 2) * self.hidden * self.ffn

    @property
    def _merger(self) -> int:
        merged = self.hidden * self.merge**2
        return merged * (merged + self.out)

    def _squares(self, side: int) -> int:
        """Sum of the squares of the windows' sides along an image's side."""
        whole, rest = divmod(side, self.window)
        return whole * self.window**2 + rest**2
