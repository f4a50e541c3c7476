"""Jobs with models whose layers are GatedDeltaNet beside full attention: two ranks of FSDP2 or Megatron train them,
vLLM generates, a replica joins, and what is exported is the folder's model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from millrace.cli import app
from tests.e2e.conftest import adds_up, finished, until
from tests.hybrid_models import save_hybrid_model
from tests.models import byte_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]
"""test_hybrid.py of the engines and test_recurrent.py of FSDP2 hold both to transformers; test_elastic.py has a replica
that joins."""
SAME_VERSION = "rollout_corr/k3_kl/same_version"
CLOSE = 5e-7
"""KL of log-probabilities that differ by 1e-3."""


def trained(
    start: Any, another_replica: Any, job: dict[str, Any], folder: Path, kind: str, *, late: bool = False
) -> tuple[Any, Any]:
    """The job once it ended, and its client. With `late` a second replica joins after the first steps."""
    byte_tokenizer().save_pretrained(save_hybrid_model(folder, kind))
    job["model"]["path"] = str(folder)
    job["rollout"] |= {"max_response_tokens": 60, "engine_options": {"max_num_seqs": 16}}
    job["schedule"] |= {"steps": 6, "prompts_per_step": 4, "max_staleness": 1}
    stack = start(replicas=1, ranks=2, engine="vllm")
    client = stack.client()
    view = client.submit(job)
    if late:
        until("a step is trained", lambda: client.job(view.id).step >= 1, 300)
        client.pause(view.id)
        another_replica(stack, "vllm")
        until("the second replica serves", lambda: serving(client) == 2, 300)
        client.resume(view.id)
    done = finished(client, view.id, 300)
    adds_up(client, done, groups_per_step=4)
    rows = [row.values for row in client.metrics(view.id) if row.step]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    apart = [row[SAME_VERSION] for row in rows if SAME_VERSION in row]
    assert apart and max(apart) < CLOSE
    return client, done


def serving(client: Any) -> int:
    return sum(replica.state == "serving" for replica in client.fleet().replicas)


def test_a_replica_joins_a_job_of_changes(start, another_replica, job, tmp_path):
    """A folder with a tower: it comes through, and the language model in it is the trained one."""
    job["publication"] = {"path": "delta"}
    client, done = trained(start, another_replica, job, tmp_path / "model", "qwen3_5_moe", late=True)
    publications = [event.data for event in client.events(done.id, follow=False) if event.kind == "publication.done"]
    assert {report.source for report in publications} == {"trainer", "sibling"}

    exported = tmp_path / "exported"
    told = CliRunner().invoke(app, ["export", done.checkpoint, str(exported)])
    assert told.exit_code == 0, told.output
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", exported))
    assert before.keys() == after.keys()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert any("linear_attn.A_log" in name for name in moved) and any("self_attn.q_proj" in name for name in moved)
    assert not any("visual" in name for name in moved)
    _, info = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_megatron_publishes_what_vllm_generates_with(start, another_replica, job, tmp_path):
    """Two ranks have half of each layer's heads."""
    job["trainer"] |= {"backend": "megatron", "backend_options": {"tensor_parallel": 2}}
    _, done = trained(start, another_replica, job, tmp_path / "model", "qwen3_5_moe")
    exported = tmp_path / "exported"
    told = CliRunner().invoke(app, ["export", done.checkpoint, str(exported)])
    assert told.exit_code == 0, told.output
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", exported))
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert any("linear_attn.conv1d" in name for name in moved) and not any("visual" in name for name in moved)


def test_an_adapter_of_attention_and_mlp(start, another_replica, job, tmp_path):
    job["model"]["lora"] = {"rank": 8, "alpha": 16}
    job["trainer"]["optimizer"] = {"lr": 1e-3}
    _, done = trained(start, another_replica, job, tmp_path / "model", "qwen3_5")
    adapter = load_file(Path(done.checkpoint) / "adapter" / "adapter_model.safetensors")
    assert any(".mlp." in name for name in adapter) and not any("linear_attn" in name for name in adapter)
    assert max(float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name) > 1e-4
    told = CliRunner().invoke(app, ["export", done.checkpoint, str(tmp_path / "merged")])
    assert told.exit_code == 0, told.output
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", tmp_path / "merged"))
    assert before.keys() == after.keys()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {
        name for name in before if any(f".{end}.weight" in name for end in LAYERS) and "visual" not in name
    }


LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
