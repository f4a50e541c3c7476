"""Towers for images: parameters, FLOPs and memory, beside what torch counts of transformers' own."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from millrace.towers import TowerShape

SIZES = {"hidden_size": 160, "num_heads": 4, "intermediate_size": 428, "depth": 4, "out_hidden_size": 256}
CONFIG = Qwen2_5_VLVisionConfig(**SIZES, fullatt_block_indexes=[1, 3])
NARROW = Qwen2_5_VLVisionConfig(**{**SIZES, "intermediate_size": 64}, fullatt_block_indexes=[1, 3])
"""Attention takes more than the MLP."""
OF_LAYERS = Qwen3VLVisionConfig(**SIZES, num_position_embeddings=144, deepstack_visual_indexes=[0, 2])
"""With features of the first decoder layers."""
WIDE = Qwen3VLVisionConfig(
    **{**SIZES, "intermediate_size": 1200}, num_position_embeddings=36, deepstack_visual_indexes=[1]
)
"""The MLP takes more than attention."""
WITHOUT = Qwen3_5VisionConfig(**SIZES, num_position_embeddings=144)
"""Without such features."""
SHAPE = TowerShape.of_config(CONFIG.to_dict(), {})
GRIDS = [(1, 4, 4), (1, 16, 16), (1, 20, 34), (2, 10, 18)]
"""Smaller than a window, of whole windows, with cut ones, of two times."""


def tower(attention: str, dtype: torch.dtype, config: Any) -> Any:
    kinds: dict[type, Any] = {
        Qwen2_5_VLVisionConfig: Qwen2_5_VisionTransformerPretrainedModel,
        Qwen3VLVisionConfig: Qwen3VLVisionModel,
        Qwen3_5VisionConfig: Qwen3_5VisionModel,
    }
    return kinds[type(config)]._from_config(config, attn_implementation=attention, dtype=dtype).eval()


def patches(grid: tuple[int, int, int], values: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(grid[0] * grid[1] * grid[2], values, dtype=dtype)


def test_flops_by_tokens_are_those_of_a_square_image() -> None:
    assert SHAPE.flops_of_tokens(64) == SHAPE.flops((1, 16, 16))
    assert SHAPE.flops_of_tokens(60) == pytest.approx(SHAPE.flops((1, 16, 16)) * 60 / 64)


@pytest.mark.parametrize("config", [CONFIG, OF_LAYERS, WITHOUT])
@pytest.mark.parametrize("grid", GRIDS)
def test_flops_are_those_that_torch_counts(grid: tuple[int, int, int], config: Any) -> None:
    module, shape = tower("eager", torch.float32, config), TowerShape.of_config(config.to_dict(), {})
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(patches(grid, shape.values, torch.float32), grid_thw=torch.tensor([grid]))
    assert shape.flops(grid) == pytest.approx(counter.get_total_flops(), rel=1e-9)
    assert shape.parameters == sum(each.numel() for each in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [CONFIG, NARROW, OF_LAYERS, WIDE, WITHOUT])
@pytest.mark.parametrize("grid", GRIDS[1:3])
def test_memory_is_what_torch_tracks(grid: tuple[int, int, int], config: Any, dtype: torch.dtype) -> None:
    module, tracker, shape = tower("sdpa", dtype, config), MemTracker(), TowerShape.of_config(config.to_dict(), {})
    tracker.track_external(module)
    weights = sum(each.nbytes for each in module.parameters())
    with torch.no_grad(), tracker:
        shown = patches(grid, shape.values, dtype)
        module(shown, grid_thw=torch.tensor([grid]))
    most = max(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
    predicted = shape.working_bytes(len(shown), dtype.itemsize)
    assert predicted == pytest.approx(most - weights, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [CONFIG, NARROW, OF_LAYERS, WIDE, WITHOUT])
def test_what_is_kept_for_the_backward_pass_is_what_torch_saves(config: Any, dtype: torch.dtype) -> None:
    """With recomputation the inputs of layers, and one layer as it is without."""
    grid, shape = GRIDS[2], TowerShape.of_config(config.to_dict(), {})
    shown, saved = patches(grid, shape.values, dtype), []
    for recompute in (False, True):
        module = tower("sdpa", dtype, config).train()
        if recompute:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        weights = {each.untyped_storage()._cdata for each in module.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            module(shown, grid_thw=torch.tensor([grid]))
        saved.append(sum(storage.nbytes() for key, storage in kept.items() if key not in weights))
    predicted = [shape.kept_bytes(len(shown), dtype.itemsize, recompute=recompute) for recompute in (False, True)]
    assert predicted[0] == pytest.approx(saved[0], rel=0.03)
    layer = (saved[0] - saved[1]) / (shape.depth - 1)
    assert predicted[1] == pytest.approx(saved[1] + layer, rel=0.2)


def test_the_processor_says_how_many_patches_an_image_has_at_most() -> None:
    assert SHAPE.most_patches == 4 * 1280
    for stated in ({"max_pixels": 28 * 28 * 24}, {"size": {"longest_edge": 28 * 28 * 24, "shortest_edge": 56 * 56}}):
        assert TowerShape.of_config(CONFIG.to_dict(), stated).most_patches == 4 * 24
