"""Tensors of every kind that a checkpoint may have, copied and written."""

from pathlib import Path

import torch

from services.trainer.checkpoints.copying import copied_to_host, write_through


def assert_copied_and_written(device: str, path: Path) -> None:
    """Tensors on this device have the same numbers in their copies and the same bytes in a file: an empty one, one
    number, one with gaps, and several dtypes."""
    on_host = {
        "wide": torch.arange(35, dtype=torch.float32).reshape(7, 5),
        "turned": torch.arange(35, dtype=torch.float32).reshape(7, 5).t(),
        "half": torch.arange(33, dtype=torch.bfloat16),
        "number": torch.tensor(3.5),
        "none": torch.empty(0, dtype=torch.int64),
        "count": torch.tensor([2**40, 3]),
    }
    tensors = {name: tensor.clone().to(device) for name, tensor in on_host.items()}
    copies = copied_to_host(tensors)
    assert copies.keys() == on_host.keys()
    assert all(torch.equal(copies[name], tensor) for name, tensor in on_host.items())
    with path.open("wb") as file:
        file.write(b"header")
        write_through(file, tensors.values())
    written = b"".join(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) for tensor in on_host.values())
    assert path.read_bytes() == b"header" + written
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(copies[name], tensor) for name, tensor in on_host.items()), "a copy is no copy"
