"""Ranks that share micro-batches (Ulysses) compute what one rank computes: scores, gradients, steps, weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from millrace.errors import InvalidJob
from services.trainer.backends import build
from services.trainer.backends.fsdp2 import activation_offload as activations
from services.trainer.backends.fsdp2 import host_adamw
from services.trainer.backends.fsdp2.attention import attend, exchanged
from services.trainer.backends.fsdp2.sequence_parallel import HeadExchange, divide_ranks
from services.trainer.backends.recurrence import Segments
from services.trainer.protocol.backend import models
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks.commands import ControlThread
from tests.forked import CONTEXT
from tests.services.trainer.backends.fsdp2.test_backend import moe_model, samples
from tests.services.trainer.backends.fsdp2.test_lora import loss
from tests.services.trainer.coordinator import coordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.step.test_critic import algorithm
from tests.services.trainer.step.test_step import OPTIMIZER, local_step

RANKS = 4
LENGTHS = [(3, 9), (12, 4), (7, 21), (5, 5), (2, 0), (1, 1)]
FEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "vocab_size": 259, "num_hidden_layers": 2}
KL = {"kl": {"name": "k3"}, "kl_coefficient": 0.5, "entropy_coefficient": 0.01}
COMPARED = {f"actor/{name}" for name in ("pg_loss", "grad_norm", "kl_loss", "entropy")} | {
    f"critic/{name}" for name in ("vf_loss", "grad_norm", "score/mean", "returns/mean")
}


@dataclass(frozen=True)
class Case:
    """A job whose micro-batches ranks share, and the same without `options` and `roles` on one rank."""

    model: str
    options: Mapping[str, Any]
    parts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    roles: Mapping[str, int] = field(default_factory=dict)
    """Ranks that share micro-batches of the reference and of the critic, where that is another number."""

    def spec(self, folder: Path, *, shared: bool) -> Any:
        trainer = {"token_budget": 64, "optimizer": OPTIMIZER, **self.parts.get("trainer", {})}
        if shared:
            trainer["backend_options"] = self.options
            trainer |= {role: {"backend_options": shared_by(ranks)} for role, ranks in self.roles.items()}
        return job_spec(folder / self.model, **{**self.parts, "trainer": trainer})


def shared_by(ranks: int, **others: Any) -> dict[str, Any]:
    return {"sequence_parallel_size": ranks, **others}


LORA = {"lora": {"rank": 4, "alpha": 8}}
RECOMPUTE = {"activation_recompute": True}
OFFLOADS = {"offload_parameters": True, "offload_optimizer": True, "offload_activations": True}
CASES = {
    # four ranks share two key-value heads, and have two copies of the model
    "tied, with a reference of another size": Case(
        "tied",
        shared_by(4, fsdp_size=2, **OFFLOADS),
        {"algorithm": KL, "trainer": {"updates_per_step": 2}},
        {"reference": 2},
    ),
    "experts, with a critic of another size": Case(
        "experts", shared_by(4), {"algorithm": algorithm(kl=None, kl_in="loss"), "trainer": RECOMPUTE}, {"critic": 2}
    ),
}
MATRIX = {
    "untied": Case("untied", shared_by(4)),
    "lora": Case("untied", shared_by(2), {"model": LORA}),
    "copies": Case("tied", shared_by(2, fsdp_size=2, offload_parameters=True), {"algorithm": KL}),
    "copies of one": Case("tied", shared_by(4, fsdp_size=1)),
    "lora in host memory": Case(
        "experts",
        shared_by(4, fsdp_size=2, offload_parameters=True),
        {"model": LORA, "algorithm": KL, "trainer": RECOMPUTE},
    ),
    "activations and optimizer in host memory": Case(
        "tied", shared_by(2, offload_activations=True, offload_optimizer=True), {"trainer": {"updates_per_step": 2}}
    ),
    "compiled": Case("untied", shared_by(2, compile_layers=True)),
    "windows": Case("windows", shared_by(4)),
    "latent": Case("latent", shared_by(4), {"trainer": RECOMPUTE}),
    "a rank's query heads are no whole groups": Case("uneven", shared_by(4), {"trainer": {"token_budget": 512}}),
    "roles on one rank each": Case(
        "untied", shared_by(2), {"algorithm": algorithm(kl_coefficient=0.1)}, {"reference": 1, "critic": 1}
    ),
    "critic": Case("untied", shared_by(4, logprob_chunk_tokens=16), {"algorithm": algorithm(kl_coefficient=0.1)}),
}


def write_models(folder: Path) -> None:
    """Model folders with random weights that are large enough for attention to matter."""
    torch.manual_seed(5)
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3, **FEW}
    Qwen3ForCausalLM(Qwen3Config(**small, num_attention_heads=12, num_key_value_heads=3, head_dim=8)).save_pretrained(
        folder / "uneven"
    )
    windows = Qwen2Config(
        **small,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    )
    Qwen2ForCausalLM(windows).save_pretrained(folder / "windows")
    latent = DeepseekV3Config(
        **small,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )
    DeepseekV3ForCausalLM(latent).save_pretrained(folder / "latent")
    moe_model(folder / "experts")


def measured(case: Case, folder: Path, *, shared: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Scores of each sequence, gradients, and weights and metrics after a step, of the whole batch."""
    control = ControlThread()
    with coordinator() as served:
        backend, step = local_step(case.spec(folder, shared=shared), torch.device("cpu"), control, served)
        parallel, drawn = backend.data_parallel, samples(LENGTHS)
        everything = MicroBatch.pack(drawn, range(len(drawn)))
        (scores,) = backend.scores([everything], temperature=0.7)
        found = {"logprobs": scores.logprobs_r, "entropy": scores.entropy_r}
        mine = list(range(len(drawn)))[parallel.rank :: parallel.size]
        batches = [MicroBatch.pack(drawn, mine[:2]), MicroBatch.pack(drawn, mine[2:])]
        backend.forward_backward(batches, loss, temperature=1.0)
        for name, parameter in backend._trained.items():
            assert parameter.grad is not None
            found[f"gradient.{name}"] = parameter.grad.full_tensor()
        backend.zero_gradients()
        metrics = step(1, random_groups(4, 4))
    control.stop()
    for prefix, model in models(backend).items():
        weights = {name: tensor for name, tensor in model.state().items() if name.startswith("model.")}
        found |= {f"{prefix}{name}": tensor.full_tensor() for name, tensor in weights.items()}  # type: ignore[union-attr]
    return {name: tensor.detach().clone() for name, tensor in found.items()}, metrics


def on_rank(rank: int, folder: Path, cases: Mapping[str, Case]) -> None:
    torch.set_num_threads(1)
    activations.SMALLEST_BYTES, host_adamw.PART_BYTES = 0, 20_000
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=RANKS)
    check_random_numbers()
    for heads, key_value_heads in ((8, 8), (8, 2), (4, 1), (12, 3)):
        check_exchange(heads, key_value_heads)
    for name, case in cases.items():
        found, metrics = measured(case, folder, shared=True)
        if rank == 0:
            save_file(found, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


def check_random_numbers() -> None:
    """Dropout differs between the ranks that share a micro-batch; what they draw for the loss does not."""
    group, _ = divide_ranks(RANKS)
    torch.manual_seed(3)
    with group.own_random_numbers(torch.device("cpu")):
        own = torch.rand(1)
    drawn = [torch.zeros(2) for _ in range(RANKS)]
    dist.all_gather(drawn, torch.cat([own, torch.rand(1)]))
    different, equal = torch.stack(drawn).unbind(1)
    assert len(different.unique()) == RANKS and len(equal.unique()) == 1


def check_exchange(heads: int, key_value_heads: int) -> None:
    """Attention between two exchanges equals attention over all tokens, and so do its gradients."""
    torch.manual_seed(0)
    group, _ = divide_ranks(RANKS)
    assert group.group is not None
    exchange = HeadExchange(RANKS, group.group.group_name)
    tokens, segments = 16, Segments.of([5, 7, 4], torch.device("cpu"))
    mine = slice(group.rank * tokens // RANKS, (group.rank + 1) * tokens // RANKS)
    whole = [torch.randn(1, count, tokens, 8, requires_grad=True) for count in (heads, *[key_value_heads] * 2)]
    part = [tensor.detach()[:, :, mine].requires_grad_() for tensor in whole]
    weights = torch.randn(1, tokens, heads, 8)
    shared, module = exchanged(attend), torch.nn.Module()
    expected, _ = shared(module, *whole, None, segments=segments)
    found, _ = shared(module, *part, None, segments=segments, exchange=exchange)
    torch.testing.assert_close(found, expected[:, mine])
    (expected * weights).sum().backward()
    (found * weights[:, mine]).sum().backward()
    for sliced, tensor in zip(part, whole, strict=True):
        assert sliced.grad is not None and tensor.grad is not None
        torch.testing.assert_close(sliced.grad, tensor.grad[:, :, mine])


def compare(folder: Path, cases: Mapping[str, Case]) -> None:
    ranks = [CONTEXT.Process(target=on_rank, args=(rank, folder, cases)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0] * RANKS
    for name, case in cases.items():
        expected, metrics = measured(case, folder, shared=False)
        found = load_file(folder / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        for tensor, values in expected.items():
            # Sums over tokens have another order. The learning rate is 3e-3.
            torch.testing.assert_close(found[tensor], values, atol=2e-5, rtol=1e-4, msg=f"{name}: {tensor}")
        here = json.loads((folder / f"{name}.json").read_text())
        assert {name for name in here.keys() ^ metrics.keys() if not name.startswith("memory/")} == set()
        for metric in COMPARED & metrics.keys():
            assert here[metric] == pytest.approx(metrics[metric], rel=1e-4, abs=1e-6), f"{name}: {metric}"


@pytest.fixture
def folder(tmp_path: Path, tied_model: Path, untied_model: Path) -> Path:
    write_models(tmp_path)
    (tmp_path / "tied").symlink_to(tied_model)
    (tmp_path / "untied").symlink_to(untied_model)
    return tmp_path


@pytest.mark.slow
def test_sharing_a_micro_batch_changes_no_number(one_rank: torch.device, folder: Path) -> None:
    compare(folder, CASES)


@pytest.mark.slow
@pytest.mark.matrix  # the test above and offload/test_combinations.py have the parts of these
def test_sharing_a_micro_batch_composes(one_rank: torch.device, folder: Path) -> None:
    compare(folder, MATRIX)


def test_a_size_that_does_not_divide_is_refused(one_rank: torch.device, tied_model: Path) -> None:
    with pytest.raises(InvalidJob) as refused:
        build(job_spec(tied_model, trainer={"backend_options": shared_by(2)}), one_rank)
    assert refused.value.what.startswith("trainer.backend_options.sequence_parallel_size: 2: 1 ranks do not divide")
