"""PPO with a critic against plain PyTorch, over micro-batches and ranks; its warm-up, its checkpoints, its refusals."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from millrace.errors import InvalidJob, InvalidState, NonFinite
from services.trainer.backends import build
from services.trainer.checkpoints import checkpoint
from services.trainer.protocol.backend import Backend, models
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks.commands import ControlThread
from services.trainer.step.schedule import critic_learning_rate, learning_rate
from tests.models import byte_tokenizer, save_tiny_model
from tests.services.trainer.backends.fsdp2.test_backend import moe_model, samples
from tests.services.trainer.checkpoints.saved import save
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import episode_groups, job_spec, random_groups
from tests.services.trainer.process import trainer
from tests.services.trainer.step.plain_ppo import PlainPpo
from tests.services.trainer.step.test_step import OPTIMIZER, local_step

CRITIC = {"clip": 0.05, "optimizer": {**OPTIMIZER, "lr": 1e-2, "warmup_steps": 0}}


def algorithm(lam: float = 1.0, gamma: float = 1.0, **parts: Any) -> dict[str, Any]:
    advantage = {"name": "gae", "options": {"gamma": gamma, "lam": lam}}
    return {"preset": "ppo", "advantage": advantage, "critic": CRITIC, **parts}


JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"kl": None, "kl_in": "loss"}, {}),
    "kl in the reward, lambda, several updates": (
        {"lam": 0.9, "gamma": 0.95, "kl_coefficient": 0.1},
        {
            "updates_per_step": 2,
            "reference": {"token_budget": 160, "backend_options": {"offload_parameters": True}},
            "critic": {"token_budget": 96, "activation_recompute": True},
        },
    ),
}


def whole(backend: Backend) -> dict[str, torch.Tensor]:
    tensors = {f"{p}{n}": t for p, model in models(backend).items() for n, t in model.state().items()}
    return {name: tensor.full_tensor().clone() for name, tensor in tensors.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("asked", "trained", "make"),
    [
        *(pytest.param(*job, random_groups, id=name) for name, job in JOBS.items()),
        pytest.param(*JOBS["kl in the reward, lambda, several updates"], episode_groups, id="episodes"),
    ],
)
def test_equals_plain_pytorch(
    asked: dict[str, Any],
    trained: dict[str, Any],
    make: Any,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
) -> None:
    """Three steps, the first of which warms the critic up; micro-batches of a few sequences each."""
    chosen = algorithm(**asked)
    chosen["critic"] = {**CRITIC, "warmup_steps": 1}
    spec = job_spec(untied_model, algorithm=chosen, trainer={"token_budget": 64, "optimizer": OPTIMIZER, **trained})
    backend, step = local_step(spec, one_rank, control, served)
    plain = PlainPpo(untied_model, spec, gamma=asked.get("gamma", 1.0), lam=asked.get("lam", 1.0))
    start = {name: tensor for name, tensor in whole(backend).items() if name.startswith("model.")}
    for number in (1, 2, 3):
        groups = make(4, 4, seed=number)
        lr = learning_rate(spec, number) if number > 1 else None
        expected = plain.ppo_step(list(groups.values()), lr=lr, critic_lr=critic_learning_rate(spec, number))
        metrics = step(number, groups)
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-6), (number, name)
        if number == 1:
            assert "actor/pg_loss" not in metrics and metrics["training/rollout_probs_diff_mean"] > 0
            assert all(torch.equal(whole(backend)[name], tensor) for name, tensor in start.items())
    for info, tensor in backend.export("float32"):
        torch.testing.assert_close(tensor, plain.model.get_parameter(info.name).detach(), atol=2e-5, rtol=1e-4)
    critic = whole(backend)
    for name, parameter in [*plain.decoder.named_parameters(prefix="model"), *plain.head.named_parameters("score")]:
        torch.testing.assert_close(critic[f"critic.model.{name}"], parameter.detach(), atol=2e-5, rtol=1e-4)


def test_reference_and_critic_have_their_own_token_budget(
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every role sees all sequences, in micro-batches of its own budget."""
    budgets = {"actor": 64, "reference": 128, "critic": 400}
    roles = {role: {"token_budget": budgets[role]} for role in ("reference", "critic")}
    spec = job_spec(tied_model, algorithm=algorithm(), trainer={"token_budget": 64, "optimizer": OPTIMIZER, **roles})
    backend: Any
    backend, step = local_step(spec, one_rank, control, served)
    seen: dict[str, list[int]] = {}

    def watch(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def watched(batches: Any, *arguments: Any, **named: Any) -> Any:
            role = "critic" if owner is backend.critic else "reference" if named.get("reference") else "actor"
            seen.setdefault(f"{role}.{name}", []).extend(len(batch.tokens_p) for batch in batches)
            return own(batches, *arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in [(backend, "logprobs"), (backend, "forward_backward")]:
        watch(owner, name)
    for name in ("values", "forward_backward"):
        watch(backend.critic, name)
    step(1, random_groups(4, 4))
    tokens = sum(seen["actor.forward_backward"])
    assert all(sum(sizes) == tokens for sizes in seen.values())
    for call, sizes in seen.items():
        assert max(sizes) <= budgets[call.partition(".")[0]]
    calls = ("actor.forward_backward", "reference.logprobs", "critic.values", "critic.forward_backward")
    counts = [len(seen[call]) for call in calls]
    assert counts[0] > counts[1] > counts[2] == counts[3] > 0


def test_metrics_and_a_fit(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path
) -> None:
    """The critic learns to predict the rewards of a batch that is trained repeatedly."""
    critic = {"clip": None, "warmup_steps": 30, "optimizer": {"lr": 3e-3}}
    spec = job_spec(tied_model, algorithm={"preset": "ppo", "kl": None, "critic": critic}, schedule={"steps": 40})
    _, step = local_step(spec, one_rank, control, served)
    groups = random_groups(4, 4)
    found = [step(number, groups) for number in range(1, 26)]
    assert found[0]["critic/values/mean"] == 0.0 and found[0]["critic/lr"] == 3e-3
    assert found[0]["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-3)
    assert found[-1]["critic/vf_explained_var"] > 0.5
    assert found[-1]["critic/vf_loss"] < found[0]["critic/vf_loss"] / 2
    assert found[0]["critic/returns/max"] == 1.0 and math.isfinite(found[0]["timing_s/update_critic"])
    assert found[0]["perf/mfu/critic"] > 0


@pytest.mark.slow
def test_two_ranks_equal_one_and_resume_on_one(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, untied_model: Path, tmp_path: Path
) -> None:
    spec = job_spec(
        untied_model,
        algorithm=algorithm(lam=0.9),
        trainer={"token_budget": 64, "optimizer": OPTIMIZER, "updates_per_step": 2, "activation_recompute": True},
    )
    backend, step = local_step(spec, one_rank, control, served)
    names = ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/vf_explained_var")
    with trainer(served, tmp_path / "log", ranks=2) as running:
        calls = running.calls()
        calls.configure(spec)
        for number in (1, 2):
            groups = random_groups(4, 4, seed=number)
            alone = step(number, groups)
            there = calls.step(number, groups, served.address).metrics
            for name in names:
                assert there[name] == pytest.approx(alone[name], rel=5e-6, abs=5e-7), (number, name)
        calls.save(str(tmp_path / "two"))
        served.script.groups = random_groups(4, 4, seed=3)
        there = calls.step(3, served.script.groups, served.address).metrics
    assert checkpoint.load(str(tmp_path / "two"), backend).version == 2
    here = step(3, random_groups(4, 4, seed=3))
    for name in names:
        assert here[name] == pytest.approx(there[name], rel=5e-6, abs=5e-7), name


def test_resuming_is_bit_for_bit(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    spec = job_spec(tied_model, algorithm=algorithm())
    backend, step = local_step(spec, one_rank, control, served)
    step(1, random_groups(4, 4))
    save(tmp_path / "one", backend, 1)
    step(2, random_groups(4, 4, seed=2))
    again, resumed = local_step(spec, one_rank, control, served)
    assert checkpoint.load(str(tmp_path / "one"), again).version == 1
    resumed(2, random_groups(4, 4, seed=2))
    expected = whole(backend)
    for name, tensor in whole(again).items():
        assert torch.equal(tensor, expected[name]), name
    without = build(job_spec(tied_model), one_rank)
    save(tmp_path / "none", without, 1)
    with pytest.raises(InvalidState, match="is a checkpoint without critic, which this job trains"):
        checkpoint.load(str(tmp_path / "none"), again)


def explode(where: str, monkeypatch: pytest.MonkeyPatch, backend: Backend, bad: torch.Tensor) -> None:
    """The gradient that this response gives overflows."""
    model: Any = models(backend)[where]
    forward_backward = model.forward_backward

    def overflowing(microbatches: Any, loss_fn: Any, **rest: Any) -> Any:
        def exploding(batch: Any, scores: Any) -> Any:
            loss, output = loss_fn(batch, scores)
            scored_r = scores if where else scores.logprobs_r
            for part in batch.targets_r.split(list(batch.sampled_lengths)):
                if torch.equal(part, bad):
                    loss = loss + (scored_r.sum() * 1e38) * 1e38
            return loss, output

        return forward_backward(microbatches, exploding, **rest)

    monkeypatch.setattr(model, "forward_backward", overflowing)


@pytest.mark.parametrize(("where", "whose"), [("", "policy"), ("critic.", "critic")])
def test_a_bad_gradient_of_one_leaves_both_as_they_were(
    where: str,
    whose: str,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = job_spec(tied_model, algorithm=algorithm(), trainer={"optimizer": OPTIMIZER})
    backend, step = local_step(spec, one_rank, control, served)
    step(1, random_groups(4, 4))
    before = whole(backend)
    groups = random_groups(4, 4, seed=1)
    prompt_id = list(groups)[3]
    bad = torch.frombuffer(bytearray(groups[prompt_id].trajectories[2].tokens), dtype=torch.int32).long()
    with monkeypatch.context() as broken:
        explode(where, broken, backend, bad)
        with pytest.raises(NonFinite, match=f"gradients of the {whose}.*prompt {prompt_id}, sample 2"):
            step(2, groups)
    after = whole(backend)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()) and after.keys() == before.keys()
    assert math.isfinite(step(2, random_groups(4, 4, seed=2))["critic/grad_norm"])


def test_values_that_are_none_stop_the_step(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path
) -> None:
    backend, step = local_step(job_spec(tied_model, algorithm=algorithm()), one_rank, control, served)
    assert backend.critic is not None
    with torch.no_grad():
        dict(backend.critic.state())["model.score.weight"].fill_(math.nan)  # type: ignore[attr-defined]
    with pytest.raises(NonFinite, match=r"values: nan at token 0 of trajectory prompt 0-0-0, sample 0"):
        step(1, random_groups(4, 4))


def with_head(folder: Path, head: dict[str, torch.Tensor]) -> Path:
    save_tiny_model(folder, tied=False, seed=5)
    save_file({**load_file(folder / "model.safetensors"), **head}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_starts_from_a_folder_of_its_own(one_rank: torch.device, tied_model: Path, tmp_path: Path) -> None:
    head = {"score.weight": torch.arange(64.0)[None] / 64, "score.bias": torch.tensor([0.0])}
    folder = with_head(tmp_path / "critic", head)
    backend = build(job_spec(tied_model, algorithm={"preset": "ppo", "critic": {"path": str(folder)}}), one_rank)
    found, stored = whole(backend), load_file(folder / "model.safetensors")
    assert torch.equal(found["critic.model.score.weight"], head["score.weight"])
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[f"critic.model.{name}"], stored[name])


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_is_saved_is_a_model_for_token_classification_and_the_start_of_another(
    kind: str, one_rank: torch.device, tied_model: Path, tmp_path: Path
) -> None:
    """The values that transformers reads from it are the critic's, and so are those of a critic that begins with it."""
    model = tied_model
    if kind == "experts":
        model = moe_model(tmp_path / "moe")
        byte_tokenizer().save_pretrained(model)
    backend = build(job_spec(model, algorithm={"preset": "ppo", "kl": None}), one_rank)
    assert backend.critic is not None
    with torch.no_grad():
        for name, tensor in backend.critic.state().items():
            if "score" in name:
                tensor.copy_(tensor + 0.25)
    target = tmp_path / "saved"
    save(target, backend, 1, huggingface_from=model)
    drawn = samples([(5, 7), (3, 9)])
    expected = backend.critic.values([MicroBatch.pack(drawn, [0, 1])])[0].split([7, 9])
    read = AutoModelForTokenClassification.from_pretrained(target / "critic", dtype=torch.float32).eval()
    for sample, values_r in zip(drawn, expected, strict=True):
        tokens = torch.tensor(np.concatenate([sample.prompt, sample.response])).long()
        with torch.no_grad():
            found = read(input_ids=tokens[None]).logits[0, len(sample.prompt) - 1 : -1, 0]
        torch.testing.assert_close(found, values_r, atol=1e-5, rtol=1e-4)
    own = {"preset": "ppo", "kl": None, "critic": {"path": str(target / "critic")}}
    again = build(job_spec(model, algorithm=own), one_rank).critic
    assert again is not None
    for name, tensor in again.state().items():
        assert torch.equal(tensor, backend.critic.state()[name]), name


def misshapen(folder: Path) -> None:
    with_head(folder, {"score.weight": torch.zeros(2, 64)})


def with_bias(folder: Path) -> None:
    with_head(folder, {"score.weight": torch.zeros(1, 64), "score.bias": torch.ones(1)})


def other_vocabulary(folder: Path) -> None:
    save_tiny_model(folder, tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "not a Hugging Face model folder"),
        (misshapen, r"its score\.weight is \(2, 64\), not \(1, 64\)"),
        (with_bias, r"its score\.bias is not 0"),
        (other_vocabulary, "it knows 300 tokens and the policy 259"),
    ],
)
def test_refuses_folders_that_are_no_critic(
    make: Callable[[Path], None], words: str, one_rank: torch.device, tied_model: Path, tmp_path: Path
) -> None:
    make(tmp_path / "critic")
    critic = {"path": str(tmp_path / "critic")}
    with pytest.raises(InvalidJob, match=rf"algorithm\.critic\.path: .*{words}"):
        build(job_spec(tied_model, algorithm={"preset": "ppo", "critic": critic}), one_rank)
