"""MFU: exact against figures worked out by hand."""

import pytest
import torch

from millrace.sequence_cost import SequenceCost
from services.trainer.step import phases as module
from services.trainer.step.phases import peak_flops, utilisation

CPU = torch.device("cpu")


def test_counts_tokens_and_pairs_and_a_third_for_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "peak_flops", lambda device: 1000.0)
    # Two ranks; 3 and 5 tokens at 10 FLOPs each and 2 a pair: 80 + 2 · (9 + 25) = 148. The critic's: 8 · 8 = 64.
    told = {"timing_s/update_actor": 0.5, "timing_s/old_log_prob": 0.2, "timing_s/ref": 0.1, "timing_s/step": 9.0}
    told["timing_s/update_critic"] = 0.25
    costs = {"actor": SequenceCost(10.0, 2.0), "critic": SequenceCost(8.0)}
    assert utilisation(costs, CPU, [3, 5], told, {"old_log_prob": 2, "ref": 1}, 2) == {
        "perf/mfu/actor": pytest.approx(148 / 0.5 / 2 / 1000),
        "perf/mfu/actor_infer": pytest.approx(148 * 2 / 3 / 0.2 / 2 / 1000),
        "perf/mfu/ref": pytest.approx(148 / 3 / 0.1 / 2 / 1000),
        "perf/mfu/critic": pytest.approx(64 / 0.25 / 2 / 1000),
    }


def test_what_a_tower_for_images_computed_is_added_to_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "peak_flops", lambda device: 1000.0)
    told = {"timing_s/update_actor": 0.5, "timing_s/old_log_prob": 0.2}
    found = utilisation({"actor": SequenceCost(10.0)}, CPU, [8], told, {"old_log_prob": 0}, 1, {"update_actor": 20.0})
    assert found == {"perf/mfu/actor": pytest.approx((80 + 20) / 0.5 / 1000)}


def test_a_pass_that_was_not_made_has_no_share_whatever_its_part_took() -> None:
    told = {"timing_s/old_log_prob": 2e-4, "timing_s/ref": 3e-4}
    assert utilisation({"actor": SequenceCost(10.0)}, CPU, [3, 5], told, {"old_log_prob": 0, "ref": 0}, 1) == {}


PEAKS = {
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H20": 148,
    "NVIDIA GB200": 2500,
}


@pytest.mark.parametrize(("name", "tflops"), PEAKS.items())
def test_knows_devices_by_name(name: str, tflops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak_flops.cache_clear()
    assert peak_flops(torch.device("cuda", 0)) == tflops * 1e12
    peak_flops.cache_clear()


def test_measures_what_is_not_published() -> None:
    assert 1e8 < peak_flops(CPU) < 1e14
