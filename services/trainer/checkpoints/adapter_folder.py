"""An adapter as PEFT stores it: adapter_config.json and adapter_model.safetensors."""

from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from millrace.errors import InvalidState
from services.trainer.protocol.adapter import Adapter
from services.trainer.ranks import collectives


def write_adapter(folder: Path, adapter: Adapter, model: Path) -> None:
    """Gathers the adapter and writes it on rank 0, float32. `model` is the folder of the model that it belongs to. A
    collective. Raises InvalidState on every rank."""
    tensors = {name: tensor.cpu() for name, tensor in adapter.export() if tensor is not None}
    with collectives.fail_together():
        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
                adapter.config.base_model_name_or_path = str(model)
                adapter.config.save_pretrained(folder)
            except (OSError, SafetensorError) as error:
                raise InvalidState(f"{folder} could not be written: {error}", "free disk space there.") from error
