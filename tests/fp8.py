"""Model folders in DeepSeek's FP8 format, and the same weights dequantized element by element."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = (24, 20)
"""Smaller than tiny models' tensors, and not a divisor of their sizes."""
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


def quantized(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """The weight as float8_e4m3fn, and one float32 factor for each block: a block's largest element becomes 448."""
    rows, columns = (-(-n // size) for n, size in zip(weight.shape, block, strict=True))
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            box = tuple(slice(at * n, (at + 1) * n) for at, n in zip((row, column), block, strict=True))
            scales[row, column] = weight[box].abs().max().clamp(min=1e-4) / LARGEST
            values[box] = (weight[box] / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


def dequantized(values: Tensor, scales: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """Each element by itself, float32: the independent reference."""
    product = torch.empty(values.shape)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            product[row, column] = float(values[row, column]) * float(scales[row // block[0], column // block[1]])
    return product


def save_quantized(source: Path, folder: Path, plain: Path, block: tuple[int, int] = BLOCK) -> None:
    """Writes the model of the folder `source` with FP8 weights to `folder`, and dequantized to float32 to `plain`.

    As in DeepSeek's releases, the matrices of attention, MLP and experts are quantized; embedding, head, norms and
    router are not.
    """
    for target in (folder, plain):
        shutil.copytree(source, target)
    stored, read = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = read[name] = tensor
        if "_proj" in name and name.endswith("weight"):
            stored[name], stored[f"{name}_scale_inv"] = quantized(tensor, block)
            read[name] = dequantized(stored[name], stored[f"{name}_scale_inv"], block)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(read, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    method = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
