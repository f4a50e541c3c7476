"""docs/megatron.md tells every option and every architecture."""

import re
from pathlib import Path

import yaml

from millrace.backends.megatron import Experts, MegatronOptions, Recompute, parse
from millrace.megatron.architectures import ARCHITECTURES

PAGE = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()


def test_every_option_is_told() -> None:
    names = set(MegatronOptions.model_fields) - {"experts"}
    names |= {f"experts.{name}" for name in Experts.model_fields}
    assert {name for name in names if f"`{name}`" not in PAGE} == set()
    assert {name for name in Recompute.model_fields if name not in PAGE} == set()


def test_its_example_is_valid() -> None:
    block = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
    assert parse(yaml.safe_load(block)["trainer"]["backend_options"]).pipeline_parallel == 8


def test_every_architecture_is_named() -> None:
    names = {"qwen2": "Qwen2", "qwen2_5_vl": "Qwen2.5-VL", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE"}
    names |= {"qwen3_next": "Qwen3-Next", "mixtral": "Mixtral", "deepseek_v3": "DeepSeek-V3"}
    names |= {"qwen3_vl": "Qwen3-VL"}
    names |= dict.fromkeys(("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"), "Qwen3.5")
    assert set(names) == set(ARCHITECTURES)
    for name in (*names.values(), "Moonlight"):
        assert name in PAGE
