"""Models with a tower for images, which is frozen and whole on each rank, or trained with the language model.

The language model is built without a frozen tower, so that optimizer, publications and checkpoints have its tensors
alone: for some model types as the whole without the tower, for others as the language model's own class.
What the tower makes of a micro-batch's images is put in the place of embeddings, inside the language model's forward
pass. The towers of some models make more features of each piece of an image, which are added to the hidden states
after the first decoder layers. With a frozen tower ranks without images compute nothing more than others.

A trained tower is a part of the module and sharded with it: optimizer, publications and checkpoints have its tensors
like all others, and its memory is divided over the ranks. Each pass over a micro-batch gathers its layers on every
rank, so a rank without images in its micro-batch computes the smallest image there is, and puts its features nowhere.
"""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from millrace.data.pictures import MODELS, WHOLE, Pictures
from millrace.errors import InvalidState
from millrace.sequence_cost import PASSES
from millrace.spec.model import Model
from millrace.towers import MOST_KEPT, TowerShape
from services.trainer.checkpoints.model_files import ModelFiles
from services.trainer.protocol.microbatch import MicroBatch

ATTENTION = "sdpa"
"""Attention implementation of the tower."""
NAME = "visual"
"""The tower's name in the model without its head."""
PREFIXES = (f"{NAME}.", f"model.{NAME}.")
"""How the names of its tensors begin in model folders."""
INNER = frozenset(f"{kind}_text" for kind in MODELS - WHOLE)
"""Model types of language models that are built alone."""
IMAGES = "image_features"
"""Keyword of the language model's forward pass: places of tokens, int64 [N], and what is put there,
[1 + layers, N, H]."""
PATCHES = "image_patches"
"""Keyword in its place with a trained tower: places of tokens, int64 [N]; which of the features of all patches is put
in each of them, int64 [N]; the patches of the images, [patches, values], and their grids, int64 [images, 3]."""
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


def with_tower(module: PreTrainedModel, model: Model, config: Any) -> PreTrainedModel:
    """The module of the folder `model`, which has this `config`, with its tower for images, to be trained. A language
    model that is built alone gets the tower as a part. Its forward pass takes the keywords of
    `TrainedTower.inputs`."""
    inner: Any = module.base_model
    if not hasattr(inner, NAME):
        kind: Any = type(getattr(_whole(model, config), NAME))
        setattr(inner, NAME, kind._from_config(copy.deepcopy(config.vision_config), dtype=module.dtype))
    tower = getattr(inner, NAME)
    tower.set_attn_implementation(ATTENTION)
    language = inner if module.config.model_type in INNER else inner.language_model
    language.register_forward_pre_hook(partial(_see, tower), with_kwargs=True)
    return module


def tower_blocks(module: nn.Module) -> list[nn.Module]:
    """The layers of the tower in the module; none if it has no tower."""
    tower: Any = getattr(getattr(module, "base_model", None), NAME, None)
    return [] if tower is None else list(tower.blocks)


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


def _see(tower: nn.Module, module: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Computes the features, and puts them as `_put` does."""
    if (seen := named.pop(PATCHES, None)) is not None:
        places_n, numbers_n, patches, grids = seen
        named[IMAGES] = places_n, _features_of(tower, patches, grids)[:, numbers_n]
    return _put(module, arguments, named)


def _features_of(tower: nn.Module, patches: Tensor, grids: Tensor) -> Tensor:
    """Features of images, those of embeddings and those of each of the first layers, [1 + layers, tokens, H]."""
    made = tower(patches, grid_thw=grids)
    return torch.stack([made.pooler_output, *(getattr(made, "deepstack_features", None) or [])])


def _whole(model: Model, config: Any) -> Any:
    """The model without its head, and without values."""
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config, trust_remote_code=model.trust_remote_code)
    return whole.base_model


@dataclass(frozen=True)
class Part:
    """A sequence of a micro-batch."""

    first: int
    """Place of its first token in the micro-batch."""
    tokens_t: Tensor
    at_n: Tensor
    """Places of its images' tokens in it, int64."""
    grids: list[Tensor]
    """The patches of each of its images by time, height and width, int64 [1, 3]."""


def places(parts: Sequence[Part]) -> Tensor:
    """Places of the images' tokens in the micro-batch, int64 [N]."""
    return torch.cat([part.first + part.at_n for part in parts])


class Images:
    """Where the images of sequences are, and the positions of all tokens, by the grids of the images' patches. No
    tensor of the tower is read: a pipeline stage without it has these alone."""

    def __init__(self, model: Model, config: Any, pictures: Pictures) -> None:
        self._pictures = pictures
        self._whole = _whole(model, config)
        self._grids: OrderedDict[bytes, Tensor] = OrderedDict()

    def positions(self, parts: Sequence[Part]) -> Tensor:
        """Positions of the tokens of a micro-batch, int64 [4, P] in host memory: in each sequence, and by time, height
        and width."""
        return torch.cat([self._positions(part) for part in parts], 1)

    def parts(self, batch: MicroBatch) -> list[Part]:
        """The sequences of a micro-batch. Raises InvalidState for one with fewer places than its images need."""
        found = []
        for number, tokens_t in enumerate(batch.tokens_p.split(list(batch.lengths))):
            files = batch.images[number] if number < len(batch.images) else ()
            grids = [self._grid(file) for file in files]
            count = sum(map(self._tokens, grids))
            # A sampled token that stands for an image is text: those of images come before it.
            at_n = (tokens_t == self._pictures.token).nonzero().squeeze(1)[:count]
            if len(at_n) < count:
                what = f"a sequence has {len(at_n)} tokens of images, and its images make {count}."
                raise InvalidState(what, "use the same processor files on replicas and trainer.")
            found.append(Part(int(batch.starts[number]), tokens_t, at_n, grids))
        return found

    def _tokens(self, grid: Tensor) -> int:
        """Tokens of an image with this grid."""
        return int(grid.prod()) // self._pictures.merged

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

    def _positions(self, part: Part) -> Tensor:
        """Positions of a sequence, int64 [4, T]."""
        text_t = torch.arange(len(part.tokens_t))
        if not part.grids:
            return text_t.expand(4, -1)
        kinds_t = torch.zeros_like(part.tokens_t)
        kinds_t[part.at_n] = 1
        by_axis, _ = self._whole.get_rope_index(
            part.tokens_t[None], mm_token_type_ids=kinds_t[None], image_grid_thw=torch.cat(part.grids)
        )
        return torch.cat([text_t[None], by_axis[:, 0]])


class Kept:
    """What was made of images' files: the last, up to a limit."""

    def __init__(self, make: Callable[[bytes], Tensor]) -> None:
        self._make = make
        self._made: OrderedDict[bytes, Tensor] = OrderedDict()

    def of(self, file: bytes) -> Tensor:
        """What is made of the file, anew if it is not kept."""
        key = _key(file)
        if key not in self._made:
            self._made[key] = self._make(file)
            while sum(made.nbytes for made in self._made.values()) > MOST_KEPT and len(self._made) > 1:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]


class TowerInputs(Images, ABC):
    """Images as the language model's forward pass takes them, on the device."""

    def __init__(self, model: Model, config: Any, pictures: Pictures, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, config, pictures)
        self._device, self._dtype = device, dtype
        self._shape = TowerShape.of_config(config.vision_config.to_dict(), {})
        self.flops = 0.0
        """FLOPs that the tower computed since this was built."""

    @property
    def weights(self) -> list[Tensor]:
        """The tower's tensors, whole on this rank; none if they are the module's."""
        return []

    @abstractmethod
    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """Arguments of the language model's forward pass for a micro-batch: its images with their places, and positions
        [4, 1, P]. Without positions if no sequence has images. Raises InvalidState for a sequence with fewer places
        than its images need."""

    def _position_ids(self, parts: Sequence[Part]) -> dict[str, Tensor]:
        return {"position_ids": self.positions(parts)[:, None].to(self._device)}


class Tower(TowerInputs):
    """The tower of a model folder, frozen. Features of images that were kept cost nothing again."""

    def __init__(self, model: Model, config: Any, pictures: Pictures, dtype: torch.dtype, device: torch.device) -> None:
        """Reads its tensors. Raises InvalidState if the folder lacks one."""
        super().__init__(model, config, pictures, dtype, device)
        kind = type(getattr(self._whole, NAME))
        with torch.device(device), torch.random.fork_rng([]):
            self._module: PreTrainedModel = kind._from_config(
                copy.deepcopy(config.vision_config), attn_implementation=ATTENTION, dtype=dtype
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
        self._kept = Kept(self._features)

    @property
    def weights(self) -> list[Tensor]:
        return list(self._module.parameters())

    @torch.no_grad()
    def _features(self, file: bytes) -> Tensor:
        """Features of one image, see `_features_of`."""
        patches, grid = self._pixels(file)
        self.flops += sum(map(self._shape.flops, grid.tolist()))
        return _features_of(self._module, patches.to(self._device, self._dtype), grid.to(self._device))

    def features(self, batch: MicroBatch) -> Tensor:
        """The features of a micro-batch with images, [1 + layers, N, H]. The grids of the images are known then."""
        return torch.cat([self._kept.of(file) for files in batch.images for file in files], 1)

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        if not batch.images:
            return {}
        features_fnh, parts = self.features(batch), self.parts(batch)
        return {IMAGES: (places(parts).to(self._device), features_fnh), **self._position_ids(parts)}


class TrainedTower(TowerInputs):
    """Images for a tower that is a part of the module, which computes them in each pass. Patches are kept."""

    def __init__(self, model: Model, config: Any, pictures: Pictures, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, config, pictures, dtype, device)
        self._kept = Kept(lambda file: self._pixels(file)[0].to(device, dtype))

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """An image that comes several times is computed once. With no image it is the smallest one, in no place."""
        files = [file for files in batch.images for file in files]
        patches = {file: self._kept.of(file) for file in files}
        grids = {file: self._grid(file) for file in patches}
        ends = dict(zip(grids, accumulate(map(self._tokens, grids.values())), strict=True))
        numbers = [torch.arange(ends[file] - self._tokens(grids[file]), ends[file]) for file in files]
        passes = PASSES if torch.is_grad_enabled() else 1.0
        self.flops += passes * sum(self._shape.flops(*grid.tolist()) for grid in grids.values())
        shown = (*patches.values(),), (*grids.values(),)
        every_patch, every_grid = map(torch.cat, shown if files else self._smallest())
        numbers_n = torch.cat([torch.zeros(0).long(), *numbers]).to(self._device)
        parts = self.parts(batch)
        seen = places(parts).to(self._device), numbers_n, every_patch, every_grid.to(self._device)
        return {PATCHES: seen, **(self._position_ids(parts) if files else {})}

    def _smallest(self) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Patches and grid of an image of one token."""
        side = self._shape.merge
        patches = torch.zeros(side**2, self._shape.values, dtype=self._dtype, device=self._device)
        return (patches,), (torch.tensor([[1, side, side]]),)


def _key(file: bytes) -> bytes:
    return hashlib.sha256(file).digest()
