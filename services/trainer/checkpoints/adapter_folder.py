"""An adapter as PEFT stores it: adapter_config.json and adapter_model.safetensors."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from millrace.hub import HubName
from services.trainer.checkpoints.huggingface import save_tensors
from services.trainer.protocol.adapter import Adapter


@dataclass(frozen=True)
class GatheredAdapter:
    """A copy of the whole adapter, to be written to such a folder."""

    config: Any
    """A `peft.LoraConfig`."""
    tensors: Mapping[str, Tensor]
    """float32, in host memory, by the names that they have in the file."""

    @classmethod
    def gather(cls, adapter: Adapter, model: str) -> Self | None:
        """The adapter on rank 0, None on other ranks. `model` is the model that it belongs to: a folder, or a name on
        the hub. A collective."""
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in adapter.export() if tensor is not None}
        if dist.get_rank() != 0:
            return None
        config = copy.copy(adapter.config)
        name = HubName.of_model(model, "model.path")
        config.base_model_name_or_path, config.revision = (name.repository, name.revision) if name else (model, None)
        return cls(config, tensors)

    def write(self, folder: Path) -> None:
        """From any thread. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_tensors(dict(self.tensors), folder / "adapter_model.safetensors")
        except SafetensorError as error:
            raise OSError(f"{folder}: {error}") from error
        self.config.save_pretrained(folder)
