"""Figures of GPUs, those of a user's file too."""

from pathlib import Path

import pytest

from millrace.errors import InvalidJob
from millrace.planner.hardware import KINDS, Links, hardware


def test_a_file_gives_the_figures_of_another_gpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text("{memory_gib: 47, bf16_tflops: 362, memory_gb_s: 864, link_gb_s: 32, price_per_hour: 1}")
    made = hardware(str(file))
    assert (made.memory_gib, made.gpus_per_host) == (47, 8)
    assert hardware("H200") is KINDS["h200"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{memory_gib: 47}", "bf16_tflops: is missing"),
        ("{memory: 47}", "there is no such field"),
        ("{memory_gib: -1, bf16_tflops: 1, memory_gb_s: 1, link_gb_s: 1, price_per_hour: 1}", "is less than 1"),
        ("[1, 2]", "is not a mapping of figures"),
        ("{", "cannot be read"),
    ],
)
def test_mistakes_in_a_file_are_told_by_field(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text(text)
    with pytest.raises(InvalidJob, match=told) as raised:
        hardware(str(file))
    assert "pydantic" not in str(raised.value) and "Fix:" in str(raised.value)


def test_an_unknown_kind_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidJob, match="did you mean `h200`"):
        hardware("h2000")


def test_groups_larger_than_a_host_use_the_network() -> None:
    links = Links(KINDS["h100"])
    assert links.gathered(1e9, 16) > links.gathered(1e9, 8) > links.gathered(1e9, 2) > links.gathered(1e9, 1) == 0
    assert links.gathered(1e9, 2, stride=8) > links.gathered(1e9, 2)
    assert links.exchanged(1e9, 16) > 4 * links.exchanged(1e9, 8)
    assert links.exchanged(1e9, 8) == pytest.approx(7 / 8 * 1e9 / links.within)
