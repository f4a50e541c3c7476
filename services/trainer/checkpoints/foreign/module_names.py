"""The tensors of a model folder as boxes of those of the transformers module, where all experts of a layer are in one
tensor, and some tensors have other names."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from millrace.checkpoints.index import Located, Part
from millrace.data.pictures import loader_of
from millrace.weights.folder_tensors import stored_shapes
from millrace.weights.loader.stored import follow_folder, stored_boxes, stored_tensors
from services.trainer.checkpoints.foreign.writing import Form, Target


def empty_module(folder: Path, trust: bool = False) -> PreTrainedModel | None:
    """The model without memory for its parameters; None for a class that only Megatron trains."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    loader = loader_of(config)
    if type(config) not in loader._model_mapping and not trust:
        return None
    with torch.device("meta"):
        module: PreTrainedModel = loader.from_config(config, trust_remote_code=trust)
    follow_folder(module, stored_shapes(folder))
    return module


def by_folder_names(module: nn.Module, stored: Mapping[str, Located]) -> dict[str, Located]:
    """The folder's tensors that are boxes of `stored`, which are whole tensors under the module's names."""
    found: dict[str, Located] = {}
    for name, like in stored_tensors(module):
        source = stored.get(name)
        if source is None or source.shape != tuple(like.shape):
            continue
        for piece, part in _parts(module, name, like, source.parts[0].key):
            found[piece] = replace(source, shape=part.extent, parts=(part,))
    return found


def module_form(module: nn.Module) -> Form | None:
    """A checkpoint with the tensors of the module's state dict, tied ones under each of their names. None if some
    tensors of the folder are not boxes of the module's."""
    same: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        same[id(parameter)].append(name)
    tied = {names[0]: tuple(names[1:]) for names in same.values()}
    found: dict[str, list[Target]] = {}
    for name, like in stored_tensors(module):
        parts = list(_parts(module, name, like, name))
        if not parts or sum(math.prod(part.extent) for _, part in parts) != like.numel():
            return None
        for piece, part in parts:
            found[piece] = [Target(part, tuple(like.shape), tied.get(name, ()))]
    return found


def _parts(module: nn.Module, name: str, like: Tensor, key: str) -> Iterator[tuple[str, Part]]:
    """The folder's tensors that are boxes of the module's tensor `name`, which is stored as `key`."""
    for piece, (box, shape) in (stored_boxes(module, name, like.shape) or {}).items():
        yield piece, Part(key, (0,) * len(shape), shape, box.offset, box.along)
