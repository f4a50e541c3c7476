"""The tensors of a model folder: which there are, by the headers of its safetensors, and which a reader leaves out.

A tensor with values of its own may not be left out silently: the trained model would be another than the folder's.
Nothing here imports torch.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import InvalidJob

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SCALES = "_scale_inv"
"""Ending of the names of a quantized tensor's scales."""
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Names of the dtypes of safetensors in which models are trained and written."""
LARGEST_HEADER = 100 << 20
"""Bytes; the format allows no more."""
METADATA = "__metadata__"
LAYER = re.compile(r"(?:^|\.)(?:model|language_model)\.layers\.(\d+)\.")
"""Finds the number of the language model's layer in the name of a tensor."""
NOT_OF_A_MODEL = (r"rotary_emb\.inv_freq$", r"^[^.]+$")
"""Patterns of what older folders store and every model computes from its config, and of a program's own entries in a
checkpoint, such as its step."""
TIED = "tie_word_embeddings"
INNER = "language_model."
TOWER = "visual."
"""How the names of the tensors of a tower for images begin; in some folders after `model.`."""
TURNED = "qwen3_vl_moe"
"""The model type whose published folders, and vLLM, have the experts of a layer as [experts, inputs, outputs], where
transformers' module has [experts, outputs, inputs]. transformers writes them as in the module, and reads both."""


def stored_name(name: str, names: Container[str]) -> str:
    """The name, among `names` of a folder's tensors, of the tensor that is trained and published as `name`: the
    language model may lie inside another one, in the folder or in the trainer, and a tower outside of it. A name that
    the folder has in no form stays as it is."""
    prefix, dot, rest = name.partition(".")
    forms = [name, inside(name), f"{prefix}{dot}{rest.removeprefix(INNER)}"]
    if rest.startswith(TOWER):
        forms.append(rest)
    return next((form for form in forms if form in names), name)


def inside(name: str) -> str:
    """The name of a language model's tensor in the folder of a model that has towers beside it."""
    prefix, dot, rest = name.partition(".")
    return f"{prefix}{dot}{INNER}{rest}"


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, without the scales of quantized ones; empty if there are no safetensors, or one of
    them cannot be read."""
    found = {name: shape for name, (_, shape) in _headers(folder).items()}
    return {name: shape for name, shape in found.items() if name.removesuffix(SCALES) not in found.keys() - {name}}


def stored_dtype(folder: Path) -> str | None:
    """The dtype of most elements of the folder's safetensors, as torch names it; None if that is not one of `DTYPES`,
    or there are no safetensors."""
    elements: Counter[str] = Counter()
    for dtype, shape in _headers(folder).values():
        elements[dtype] += math.prod(shape)
    return DTYPES.get(elements.most_common(1)[0][0]) if elements else None


def _headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype, as safetensors names it, and the shape of each tensor; empty as for `stored_shapes`."""
    try:
        index = folder / INDEX
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {SINGLE}
        entries = {name: entry for file in files for name, entry in _header(folder / str(file)).items()}
        return {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > LARGEST_HEADER:
            raise ValueError(f"{file} has a header of {length} bytes")
        entries = json.loads(opened.read(length))
    return {name: entry for name, entry in entries.items() if name != METADATA}


@dataclass(frozen=True)
class Unread:
    """The tensors that were not taken, sorted."""

    copies: tuple[tuple[str, str], ...]
    """Tensors that the config ties to another one, and that one: they may differ from it by their values only."""
    lost: tuple[str, ...]
    """Tensors that the model does not have: no training with this config keeps them."""
    ahead: tuple[str, ...]
    """Tensors of heads that predict several tokens at once. They are not trained, and left out of what is saved."""

    @classmethod
    def of(
        cls,
        stored: Iterable[str],
        taken: Collection[str],
        *,
        tied: Mapping[str, str],
        ignored: Collection[str],
        layers: int | None,
    ) -> "Unread":
        """`stored` are the names in the folder and `taken` those that were read. `tied`: names that the config ties,
        with the name that is read for them. `ignored`: patterns of names that the model may ignore. `layers`: number
        of the language model's layers; None if that is unknown."""
        patterns = [re.compile(each) for each in (*ignored, *NOT_OF_A_MODEL)]
        left = sorted(name for name in set(stored) - set(taken) if not any(one.search(name) for one in patterns))
        ahead = tuple(name for name in left if predicts_ahead(name, layers))
        copies = tuple((name, tied[name]) for name in left if tied.get(name) in taken)
        return cls(copies, tuple(sorted(set(left) - set(ahead) - {name for name, _ in copies})), ahead)

    def check(self, place: str) -> None:
        """Raises InvalidJob for tensors that would be lost. `place`: the field of the job that names the folder, with
        its value."""
        if self.lost:
            more = f" and {len(self.lost) - 3} more" if len(self.lost) > 3 else ""
            what = (
                f"{place} stores {', '.join(self.lost[:3])}{more}, for which the model of its config.json has no place."
            )
            raise InvalidJob(what, "give the config.json of these weights, or a folder without them.")


def other_values(place: str, name: str, source: str) -> InvalidJob:
    """The error for a stored tensor that is not equal to the one to which the config ties it."""
    what = f"{place} stores {name} with other values than {source}, to which its config.json ties it ({TIED})."
    return InvalidJob(what, f"set {TIED} to false in its config.json to keep it, or remove it from the weights.")


def predicts_ahead(name: str, layers: int | None) -> bool:
    """Whether a tensor belongs to a head that predicts several tokens at once."""
    layer = LAYER.search(name)
    beyond = layer is not None and layers is not None and int(layer[1]) >= layers
    return beyond or any(part.startswith("mtp") for part in name.split("."))
