"""A job that begins with the adapter of another one.

`make test` has such adapters in the trainers' and engines' tests: tests/services/trainer/backends/megatron/test_lora.py
and fsdp2/test_lora.py, tests/services/rollout/engines/test_adapter_places.py.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import adds_up, finished

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp2", "megatron"),
        ("fsdp2", "fsdp2"),
        ("megatron", "fsdp2"),
    ],
)
def test_an_adapter_of_one_job_starts_another(before, after, client, job, tmp_path):
    """The second job trains with a learning rate of 0: what it saves is what it began with. Its engine computes what
    its trainer computes, so the adapter was published before the first answer."""
    job["rollout"] |= {"max_response_tokens": 16, "engine_options": {"max_num_seqs": 16}}
    job["schedule"] |= {"steps": 2, "prompts_per_step": 4, "max_staleness": 0, "save_every_steps": 1}
    job["model"]["lora"] = {"rank": 8, "alpha": 16}
    job["trainer"] |= {"backend": before, "optimizer": {"lr": 1e-2}}
    first = finished(client, client.submit({**job, "output": str(tmp_path / "first")}).id)
    adapters = [Path(first.checkpoint).with_name(f"step-{step}") / "adapter" for step in (1, 2)]
    trained = load_file(adapters[1] / "adapter_model.safetensors")
    earlier = load_file(adapters[0] / "adapter_model.safetensors")
    assert not all(torch.equal(trained[name], earlier[name]) for name in trained)

    job["model"]["lora"] = {"adapter_path": str(adapters[1])}
    job["trainer"] |= {"backend": after, "optimizer": {"lr": 0.0}}
    job["schedule"]["steps"] = 1
    second = finished(client, client.submit({**job, "output": str(tmp_path / "second")}).id)
    adds_up(client, second, groups_per_step=4)
    kept = load_file(Path(second.checkpoint) / "adapter" / "adapter_model.safetensors")
    assert kept.keys() == trained.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in trained.items())
    assert any(tensor.abs().max() > 1e-3 for name, tensor in kept.items() if ".lora_B." in name)
    assert client.metrics(second.id)[-1].values["training/rollout_logprobs_diff_max"] < 1e-3
