"""Buffers that a model computes from its config, and that no file holds: the frequencies of rotary embeddings, say."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


def computed_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers of a model on the meta device that are not stored, as transformers sets them when it loads one.

    The parameters stay on the meta device, so their initialisation takes neither memory nor time. Raises
    NotImplementedError or RuntimeError where a model's initialisation reads its parameters.
    """
    names = [name for name, _ in model.named_non_persistent_buffers()]
    for name in names:
        owner, _, key = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        meta = buffers[key]
        assert meta is not None
        buffers[key] = torch.empty_like(meta, device="cpu")
    for part in model.modules():
        part.__dict__.pop("_is_hf_initialized", None)  # set on the meta device, where it means nothing
    model.initialize_weights()
    return {name: model.get_buffer(name) for name in names}
