"""Models with a tower for images: the language model is sharded and trained, the tower frozen and whole on each rank.

The language model is built without its tower, so that optimizer, publications and checkpoints have its tensors alone:
for some model types as the whole without the tower, for others as the language model's own class.
Ranks and sequences without images call nothing more than others: what the tower makes of a micro-batch's images is put
in the place of embeddings, inside the language model's forward pass. The towers of some models make more features of
each piece of an image, which are added to the hidden states after the first decoder layers.
"""

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from millrace.data.pictures import MODELS, WHOLE, Pictures
from millrace.errors import InvalidState
from millrace.spec.model import Model
from millrace.towers import MOST_KEPT, TowerShape
from services.trainer.checkpoints.model_files import ModelFiles
from services.trainer.protocol.microbatch import MicroBatch

NAME = "visual"
"""The tower's name in the model without its head."""
PREFIXES = (f"{NAME}.", f"model.{NAME}.")
"""How the names of its tensors begin in model folders."""
INNER = frozenset(f"{kind}_text" for kind in MODELS - WHOLE)
"""Model types of language models that are built alone."""
IMAGES = "image_features"
"""Keyword of the language model's forward pass."""
MOST_GRIDS = 1 << 16
"""Images whose grids a rank keeps."""


def without_tower(module: PreTrainedModel) -> PreTrainedModel:
    """The module without its tower for images, if it has one. Its language model takes the keyword of `Tower.inputs`,
    and a folder's tensors of the tower are not missed in it."""
    inner: Any = module.base_model
    if module.config.model_type in INNER:
        inner.register_forward_pre_hook(_put, with_kwargs=True)
        return module
    if module.config.model_type not in WHOLE or not hasattr(inner, NAME):
        return module
    inner.tower_layers = [name for name, part in module.named_modules() if type(part) is nn.Linear and _of_tower(name)]
    delattr(inner, NAME)
    ignored = {rf"^(model\.)?{NAME}\."} | set(module._keys_to_ignore_on_load_unexpected or ())
    module._keys_to_ignore_on_load_unexpected = ignored
    inner.language_model.register_forward_pre_hook(_put, with_kwargs=True)
    return module


def tower_layers(module: PreTrainedModel) -> list[str]:
    """The linear layers of the tower that `without_tower` took from the module, by their names in the whole model."""
    return list(getattr(module.base_model, "tower_layers", ()))


def _of_tower(name: str) -> bool:
    return name.startswith(PREFIXES)


def _put(module: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Puts the first features in the places of embeddings, and hands the others to the language model."""
    if (shown := named.pop(IMAGES, None)) is not None:
        places_n, features_fnh = shown
        if (whole := named.get("inputs_embeds")) is None:
            whole = module.get_input_embeddings()(named.pop("input_ids"))
        named["inputs_embeds"] = whole.index_copy(1, places_n, features_fnh[:1].to(whole.dtype))
        if len(features_fnh) > 1:
            seen = torch.zeros(whole.shape[:2], dtype=torch.bool, device=whole.device)
            named |= {
                "visual_pos_masks": seen.index_fill(1, places_n, True),
                "deepstack_visual_embeds": list(features_fnh[1:]),
            }
    return arguments, named


class Images:
    """Where the images of sequences are, and the positions of all tokens, by the grids of the images' patches. No
    tensor of the tower is read."""

    def __init__(self, model: Model, config: Any, pictures: Pictures) -> None:
        self._pictures = pictures
        with torch.device("meta"):
            whole: Any = AutoModelForImageTextToText.from_config(config, trust_remote_code=model.trust_remote_code)
        self._whole = whole.base_model
        """The model without its head, and without values."""
        self._grids: OrderedDict[bytes, Tensor] = OrderedDict()

    def positions(self, batch: MicroBatch) -> Tensor:
        """Positions of the tokens of a micro-batch, int64 [4, P] in host memory: in each sequence, and by time, height
        and width. Raises InvalidState for a sequence with fewer places than its images need."""
        return torch.cat([self._positions(tokens_t, at_n, grids) for _, tokens_t, at_n, grids in self._parts(batch)], 1)

    def _parts(self, batch: MicroBatch) -> Iterator[tuple[int, Tensor, Tensor, list[Tensor]]]:
        """For each sequence its first place in the micro-batch, its tokens, the places of its images' tokens in it, and
        the grids of its images."""
        for number, tokens_t in enumerate(batch.tokens_p.split(list(batch.lengths))):
            files = batch.images[number] if number < len(batch.images) else ()
            grids = [self._grid(file) for file in files]
            count = sum(int(grid.prod()) // self._pictures.merged for grid in grids)
            # A sampled token that stands for an image is text: those of images come before it.
            at_n = (tokens_t == self._pictures.token).nonzero().squeeze(1)[:count]
            if len(at_n) < count:
                what = f"a sequence has {len(at_n)} tokens of images, and its images make {count}."
                raise InvalidState(what, "use the same processor files on replicas and trainer.")
            yield int(batch.starts[number]), tokens_t, at_n, grids

    def _grid(self, file: bytes) -> Tensor:
        """The patches of an image by time, height and width, int64 [1, 3]."""
        key = _key(file)
        return self._grids[key] if key in self._grids else self._pixels(file)[1]

    def _pixels(self, file: bytes) -> tuple[Tensor, Tensor]:
        """The patches of an image, float32 [patches, values], and its grid, which is kept."""
        patches, grid = self._pictures.pixels(self._pictures.opened([file]))
        self._grids[_key(file)] = grid
        if len(self._grids) > MOST_GRIDS:
            self._grids.popitem(last=False)
        return patches, grid

    def _positions(self, tokens_t: Tensor, at_n: Tensor, grids: Sequence[Tensor]) -> Tensor:
        """Positions of a sequence, int64 [4, T]."""
        text_t = torch.arange(len(tokens_t))
        if not grids:
            return text_t.expand(4, -1)
        kinds_t = torch.zeros_like(tokens_t)
        kinds_t[at_n] = 1
        by_axis, _ = self._whole.get_rope_index(
            tokens_t[None], mm_token_type_ids=kinds_t[None], image_grid_thw=torch.cat(list(grids))
        )
        return torch.cat([text_t[None], by_axis[:, 0]])


class Tower(Images):
    """The tower of a model folder, frozen."""

    def __init__(self, model: Model, config: Any, pictures: Pictures, dtype: torch.dtype, device: torch.device) -> None:
        """Reads its tensors. Raises InvalidState if the folder lacks one."""
        super().__init__(model, config, pictures)
        self._device, self._dtype = device, dtype
        kind = type(getattr(self._whole, NAME))
        with torch.device(device), torch.random.fork_rng([]):
            self._module: PreTrainedModel = kind._from_config(
                copy.deepcopy(config.vision_config), attn_implementation="sdpa", dtype=dtype
            )
        self._module.requires_grad_(False).eval()
        with (
            ModelFiles(Path(model.path), None if model.weights is None else Path(model.weights)) as files,
            torch.no_grad(),
        ):
            for name, parameter in self._module.named_parameters():
                stored = next((prefix + name for prefix in PREFIXES if files.has(prefix + name)), None)
                if stored is None:
                    what = f"model.path: {model.path} lacks {PREFIXES[0]}{name}, a tensor of its tower for images."
                    raise InvalidState(what, "give a folder whose safetensors hold the whole model.")
                parameter.copy_(files.whole(stored))
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._shape = TowerShape.of_config(config.vision_config.to_dict(), {})
        self.flops = 0.0
        """What it computed since it was built. Features that were kept cost nothing again."""

    @property
    def weights(self) -> list[Tensor]:
        """Its tensors, whole on this rank."""
        return list(self._module.parameters())

    @torch.no_grad()
    def _features(self, file: bytes) -> Tensor:
        """Features of an image, those of embeddings and those of each of the first layers, [1 + layers, tokens, H]."""
        key = _key(file)
        if key not in self._kept:
            patches, grid = self._pixels(file)
            made: Any = self._module(patches.to(self._device, self._dtype), grid_thw=grid.to(self._device))
            of_layers = getattr(made, "deepstack_features", None) or []
            self._kept[key] = torch.stack([made.pooler_output, *of_layers])
            self.flops += sum(map(self._shape.flops, grid.tolist()))
            while sum(kept.nbytes for kept in self._kept.values()) > MOST_KEPT and len(self._kept) > 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def features(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """For a micro-batch with images the places of their tokens, int64 [N], and the features that are put there,
        [1 + layers, N, H]. Raises InvalidState for a sequence with fewer places than its images need."""
        features_fnh = torch.cat([self._features(file) for files in batch.images for file in files], 1)
        places_n = torch.cat([first + at_n for first, _, at_n, _ in self._parts(batch)])
        return places_n.to(self._device), features_fnh

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """Arguments of the language model's forward pass for a micro-batch: the features of its images with their
        places, and positions [4, 1, P]. Empty if no sequence has images. Raises InvalidState as `features`."""
        if not batch.images:
            return {}
        return {IMAGES: self.features(batch), "position_ids": self.positions(batch)[:, None].to(self._device)}


def _key(file: bytes) -> bytes:
    return hashlib.sha256(file).digest()
