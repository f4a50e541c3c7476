"""LoRA on the fsdp2 backend: equal to PEFT's own model, saved as PEFT does, merged where it is published."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import config_of
from millrace.errors import InvalidJob
from millrace.megatron.architectures.published import shape_of
from millrace.spec.lora import Lora
from millrace.weights.plans.manifest import Content
from services.trainer.backends import build
from services.trainer.backends.fsdp2.lora import inject
from services.trainer.backends.fsdp2.published import parts
from services.trainer.backends.lora import configuration, settings_of
from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch, Sample
from tests.forked import CONTEXT
from tests.services.trainer.backends.fsdp2.test_backend import moe_model, samples
from tests.services.trainer.checkpoints.saved import write_adapter
from tests.services.trainer.groups import job_spec

LENGTHS = [(3, 5), (20, 7), (1, 30), (7, 11)]


def backend_with(folder: Path, device: torch.device, lora: dict[str, Any], **changes: Any) -> Any:
    return build(job_spec(folder, model={"lora": lora}, **changes), device)


def loss(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, None]:
    return -scores.logprobs_r.sum() / 50, None


def trained(backend: Any, drawn: Sequence[Sample], updates: int = 3) -> None:
    batch = MicroBatch.pack(drawn, range(len(drawn)))
    for _ in range(updates):
        backend.forward_backward([batch], loss, temperature=1.0)
        backend.optimizer_step(lr=1e-2, gradient_scale=1.0)


def alone(model: Any, drawn: Sequence[Sample]) -> Tensor:
    """Log-probabilities of each sequence by the model itself, without packing."""
    values = []
    for sample in drawn:
        tokens = torch.cat([torch.from_numpy(part) for part in (sample.prompt, sample.response)]).long()
        logprobs = model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)[:-1]
        values.append(logprobs.gather(-1, tokens[1:, None])[-len(sample.response) :, 0])
    return torch.cat(values)


def by_peft(folder: Path, start: Path, drawn: Sequence[Sample], updates: int) -> Tensor:
    """The same updates of the adapter in `start`, by PEFT and AdamW, sequence by sequence."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), start, is_trainable=True
    )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for _ in range(updates):
        (-alone(model, drawn).sum() / 50).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return alone(model, drawn)


CASES: list[dict[str, Any]] = [
    {"rank": 4, "alpha": 8},
    {"rank": 8, "alpha": 4, "rslora": True, "target_modules": ["q_proj", "down_proj"], "init": "gaussian"},
    {"rank": 2, "alpha": 8, "dora": True, "exclude_modules": ["o_proj"], "merge": True},
]


@pytest.mark.parametrize("lora", CASES, ids=["all linear", "rslora", "dora"])
def test_training_equals_pefts(
    one_rank: torch.device, untied_model: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    """From the same first adapter, three updates of the backend and of PEFT's own model agree. What the backend
    publishes, and the adapter that it saves, compute the same."""
    drawn = samples(LENGTHS)
    backend = backend_with(untied_model, one_rank, lora)
    write_adapter(tmp_path / "start", backend.adapter, untied_model)
    trained(backend, drawn)
    (logprobs_r,) = backend.logprobs([MicroBatch.pack(drawn, range(len(drawn)))], temperature=1.0)
    torch.testing.assert_close(
        logprobs_r, by_peft(untied_model, tmp_path / "start", drawn, updates=3), atol=2e-4, rtol=1e-4
    )

    write_adapter(tmp_path / "saved", backend.adapter, untied_model)
    base = AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)
    with torch.no_grad():
        from_folder = alone(PeftModel.from_pretrained(base, tmp_path / "saved"), drawn)
        published = AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)
        published.load_state_dict({info.name: tensor for info, tensor in backend.export("float32")}, strict=True)
        torch.testing.assert_close(from_folder, logprobs_r, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(alone(published, drawn), logprobs_r, atol=2e-5, rtol=1e-5)


def test_it_begins_as_the_model_and_the_reference_stays_it(one_rank: torch.device, tied_model: Path) -> None:
    drawn = samples(LENGTHS)
    batch = MicroBatch.pack(drawn, range(len(drawn)))
    backend = backend_with(tied_model, one_rank, {"rank": 4}, algorithm={"kl": {"name": "k3"}})
    with torch.no_grad():
        expected_r = alone(AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32), drawn)
    torch.testing.assert_close(backend.logprobs([batch], temperature=1.0)[0], expected_r, atol=2e-5, rtol=1e-5)
    trained(backend, drawn)
    (moved_r,) = backend.logprobs([batch], temperature=1.0)
    (reference_r,) = backend.logprobs([batch], temperature=1.0, reference=True)
    assert (moved_r - expected_r).abs().max() > 0.1
    torch.testing.assert_close(reference_r, expected_r, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(backend.logprobs([batch], temperature=1.0)[0], moved_r, atol=0, rtol=0)
    trained(backend, drawn, updates=1)  # the adapters are trained again after the reference was computed
    assert not torch.equal(backend.logprobs([batch], temperature=1.0)[0], moved_r)


def test_only_adapters_are_trained_and_saved(one_rank: torch.device, untied_model: Path) -> None:
    backend = backend_with(untied_model, one_rank, {"rank": 4})
    model = AutoModelForCausalLM.from_pretrained(untied_model)
    assert backend.parameters == get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).num_parameters(
        only_trainable=True
    )
    trained(backend, samples(LENGTHS), updates=1)
    assert all("lora_" in name for name in backend.state())
    assert {name.partition(".")[0] for name in backend.state()} == {"model", "exp_avg", "exp_avg_sq"}


def test_an_adapter_is_trained_further(one_rank: torch.device, untied_model: Path, tmp_path: Path) -> None:
    drawn = samples(LENGTHS)
    batch = MicroBatch.pack(drawn, range(len(drawn)))
    first = backend_with(untied_model, one_rank, {"rank": 4, "alpha": 16, "target_modules": ["v_proj"]})
    trained(first, drawn)
    write_adapter(tmp_path / "adapter", first.adapter, untied_model)
    (expected_r,) = first.logprobs([batch], temperature=1.0)
    second = backend_with(untied_model, one_rank, {"adapter_path": str(tmp_path / "adapter"), "dropout": 0.5})
    assert second.adapter.settings == first.adapter.settings
    torch.testing.assert_close(second.logprobs([batch], temperature=1.0)[0], expected_r, atol=1e-6, rtol=1e-6)


def test_the_first_values_of_a_layer_do_not_depend_on_the_others(one_rank: torch.device, untied_model: Path) -> None:
    """Megatron's names of fused layers name the layers in them."""
    everywhere = dict(backend_with(untied_model, one_rank, {"rank": 4}).adapter.export())
    chosen = {"rank": 4, "target_modules": ["linear_qkv", "down_proj"], "exclude_modules": ["k_proj"]}
    some = dict(backend_with(untied_model, one_rank, chosen).adapter.export())
    assert {name.split(".")[-3] for name in some} == {"q_proj", "v_proj", "down_proj"}
    assert all(torch.equal(tensor, everywhere[name]) for name, tensor in some.items())


def test_dropout_only_during_updates(one_rank: torch.device, untied_model: Path) -> None:
    drawn = samples(LENGTHS)
    batch = MicroBatch.pack(drawn, range(len(drawn)))
    backend = backend_with(untied_model, one_rank, {"rank": 4, "dropout": 0.5})
    trained(backend, drawn)
    (again_r,) = backend.logprobs([batch], temperature=1.0)
    torch.testing.assert_close(backend.logprobs([batch], temperature=1.0)[0], again_r, atol=0, rtol=0)
    updating: list[Tensor] = []

    def keep(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, None]:
        updating.append(scores.logprobs_r.detach().clone())
        return scores.logprobs_r.sum(), None

    backend.forward_backward([batch, batch], keep, temperature=1.0)
    assert not torch.equal(*updating)


@pytest.mark.parametrize(
    ("lora", "options", "named"),
    [
        ({"target_modules": ["q_prj"]}, {}, "model.lora.target_modules"),
        ({"target_modules": ["embed_tokens"]}, {}, "model.lora.target_modules"),
        ({"adapter_path": "/nowhere"}, {}, "model.lora.adapter_path"),
    ],
)
def test_refused(
    one_rank: torch.device, tied_model: Path, lora: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidJob) as refused:
        backend_with(tied_model, one_rank, lora, trainer={"backend_options": options})
    assert refused.value.what.startswith(f"{named}:")


def on_rank(rank: int, store: str, folder: Path, written: Path) -> None:
    """Each rank computes half of the samples."""
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for dtype in ("float32", "bfloat16"):
        backend = backend_with(folder, torch.device("cpu"), CASES[0], trainer={"dtype": dtype})
        trained(backend, samples(LENGTHS)[rank::2])
        write_adapter(written / dtype, backend.adapter, folder)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_the_same_adapter(one_rank: torch.device, untied_model: Path, tmp_path: Path) -> None:
    backend = backend_with(untied_model, one_rank, CASES[0])
    trained(backend, samples(LENGTHS))
    expected = {name: tensor for name, tensor in backend.adapter.export()}
    arguments = (str(tmp_path / "store"), untied_model, tmp_path)
    ranks = [CONTEXT.Process(target=on_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 3e-3)):
        found = load_file(tmp_path / dtype / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().mean() < tolerance, name


def test_routers_of_experts_have_no_adapter(one_rank: torch.device, tmp_path: Path) -> None:
    folder = moe_model(tmp_path / "moe")
    backend = backend_with(folder, one_rank, {"rank": 2})
    names = [name for name, _ in backend.adapter.export()]
    assert any("q_proj" in name for name in names)
    assert not any("gate." in name or "router" in name for name in names)
    assert {info.name for info, _ in backend.export("float32")} == {
        info.name for info, _ in build(job_spec(folder), one_rank).export("float32")
    }


def test_dora_is_only_published_merged(one_rank: torch.device, untied_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"model\.lora\.merge: false: engines cannot serve DoRA"):
        backend_with(untied_model, one_rank, {"rank": 2, "dora": True})
    backend = backend_with(untied_model, one_rank, {"rank": 2, "dora": True, "merge": True})
    assert backend.adapter.parts == {}
    write_adapter(tmp_path / "dora", backend.adapter, untied_model)
    with pytest.raises(InvalidJob, match=r"model\.lora\.merge: .*DoRA"):
        backend_with(untied_model, one_rank, {"adapter_path": str(tmp_path / "dora")})
    backend_with(untied_model, one_rank, {"adapter_path": str(tmp_path / "dora"), "merge": True})


def test_an_adapter_of_rank_32_has_at_least_20_times_fewer_bytes() -> None:
    """Of Qwen3-30B-A3B, all linear layers, as both are published."""
    config = AutoConfig.for_model(**config_of(shape_of("qwen3-30b-a3b")))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapter = configuration(lora := Lora(rank=32))
    inject(module, adapter, lora)
    published = parts(module, settings_of(adapter), torch.device("meta"), 0)
    model, alone = (published[content].manifest("bfloat16") for content in (Content.BASE, Content.ADAPTER))
    assert model.bytes > 61e9 and len(alone.tensors) == 2 * 4 * 48
    assert 20 * alone.bytes < model.bytes
