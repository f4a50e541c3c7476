"""The tensors of a model folder in a checkpoint that has those of the transformers module: all experts of a layer in
one tensor, and some under other names."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.checkpoints.located import Located, Part
from millrace.weights.loader.stored import stored_tensors, views
from millrace.weights.plans.views import viewed_box


def empty_module(folder: Path, trust: bool = False) -> nn.Module | None:
    """The model without memory for its parameters; None for a class that only Megatron trains."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    if type(config) not in AutoModelForCausalLM._model_mapping and not trust:
        return None
    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    return module


def by_folder_names(module: nn.Module, stored: Mapping[str, Located]) -> dict[str, Located]:
    """The folder's tensors that are boxes of `stored`, which are whole tensors under the module's names."""
    found: dict[str, Located] = {}
    for name, like in stored_tensors(module):
        source = stored.get(name)
        if source is None or source.shape != tuple(like.shape):
            continue
        for piece, view in (views(module, name, torch.empty(like.shape, device="meta")) or {}).items():
            shape = tuple(view.shape)
            box = viewed_box(source.shape, (int(view.storage_offset()), shape, tuple(view.stride())))
            if box is None:
                continue
            part = Part(source.parts[0].key, (0,) * len(shape), shape, box.offset, box.along)
            found[piece] = replace(source, shape=shape, parts=(part,))
    return found
