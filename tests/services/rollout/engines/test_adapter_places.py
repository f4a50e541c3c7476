"""Which layers have an adapter, and where vLLM and SGLang put what a worker holds of it."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig

from millrace.errors import InvalidJob, PublicationFailed
from millrace.megatron.adapters import linear_layers
from millrace.megatron.architectures import read_shape
from millrace.megatron.weights import TRANSFORMER_ENGINE
from millrace.spec import JobSpec, received
from millrace.spec.lora import Lora
from millrace.weights.loader.learn import LearnedLayout, learn_layout
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from services.rollout.engines.adapter import AdaptedLayer, AdapterShape, adapter_shape, check_placed
from services.rollout.engines.sglang import adapter as sglang_adapter
from services.rollout.engines.vllm import adapter as vllm_adapter
from services.rollout.engines.vllm.options import check_model, engine_arguments
from services.rollout.weights.in_worker.model import without_adapters
from services.trainer.backends.fsdp2.lora import inject, layers
from services.trainer.backends.lora import configuration
from tests.adapters import with_adapter
from tests.models import byte_tokenizer
from tests.services.rollout.jobs import adapter_job
from tests.services.trainer.backends.megatron import tiny

RANK, HEAD_DIM, HEADS, KV_HEADS, HIDDEN, INNER = 4, 8, 4, 2, 16, 24
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
SHAPE = AdapterShape(
    RANK,
    (
        AdaptedLayer(f"{ATTENTION}.q_proj", HIDDEN, Q),
        AdaptedLayer(f"{ATTENTION}.v_proj", HIDDEN, KV),
        AdaptedLayer(f"{ATTENTION}.o_proj", Q, HIDDEN),
        AdaptedLayer(f"{MLP}.gate_proj", HIDDEN, INNER),
        AdaptedLayer(f"{MLP}.up_proj", HIDDEN, INNER),
    ),
)


def tensors_of(shape: AdapterShape) -> dict[str, torch.Tensor]:
    """Different numbers in every element of the adapter."""
    sizes = {each.lora_a: (shape.rank, each.inputs) for each in shape.layers}
    sizes |= {each.lora_b: (each.outputs, shape.rank) for each in shape.layers}
    numbers = torch.arange(1.0, 1 + sum(a * b for a, b in sizes.values())).split([a * b for a, b in sizes.values()])
    return {name: part.view(size).clone() for (name, size), part in zip(sizes.items(), numbers, strict=True)}


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    return Manifest(tuple(TensorInfo(n, tuple(t.shape), "float32") for n, t in tensors.items()), Content.ADAPTER)


# Which layers have an adapter.


def lora_job(folder: Path, **lora: Any) -> JobSpec:
    spec = adapter_job(folder, "vllm")
    asked = Lora(merge=False, **lora)
    made = spec.model_copy(update={"model": spec.model.model_copy(update={"lora": asked})})
    return received(made.model_dump_json())  # as a replica gets it


DENSE: list[dict[str, Any]] = [
    {},
    {"target_modules": ["q_proj", "self_attn.v_proj"], "rank": 3},
    {"target_modules": ["linear_qkv", "layers.1.mlp.up_proj", "o_proj"]},
    {"exclude_modules": ["down_proj", "model.layers.0.self_attn.k_proj"]},
]
LATENT: list[dict[str, Any]] = [
    {},
    {
        "target_modules": ["linear_qkv", "layers.0.mlp.up_proj", "kv_b_proj"],
        "exclude_modules": ["layers.0.mlp.up_proj"],
    },
]
ATTENTION_ONLY: list[dict[str, Any]] = [*DENSE[:2], {"exclude_modules": ["o_proj", "mlp.gate"]}]
KINDS = {"qwen2": DENSE, "qwen3": DENSE, "qwen3_moe": ATTENTION_ONLY, "moonlight": LATENT}


@pytest.mark.parametrize(("kind", "lora"), [(kind, lora) for kind, cases in KINDS.items() for lora in cases], ids=str)
def test_engine_and_trainer_choose_the_same_layers(kind: str, lora: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.save(kind, tmp_path)
    spec = lora_job(tmp_path, **lora)
    shape = adapter_shape(spec)
    assert spec.model.lora is not None and shape is not None
    inject(model, configuration(spec.model.lora), spec.model.lora)
    trained = {name: (part.in_features, part.out_features) for name, part in layers(model).items()}
    assert {each.name: (each.inputs, each.outputs) for each in shape.layers} == trained
    assert shape.rank == spec.model.lora.rank
    assert AdapterShape.decode(shape.encode()) == shape


def test_engine_and_megatron_choose_the_same_layers_of_a_model_with_a_tower(tmp_path: Path) -> None:
    tiny.save("qwen2_5_vl", tmp_path)
    shape, served = read_shape(tmp_path), adapter_shape(lora_job(tmp_path))
    assert served is not None
    assert {each.name for each in served.layers} == set(
        map(shape.names.in_module, linear_layers(shape, TRANSFORMER_ENGINE))
    )


def test_the_adapter_of_a_folder_is_served_as_it_is_there(tied_model: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tied_model)
    with_adapter(base, seed=1, rank=6, alpha=3, targets=["k_proj", "down_proj"]).save_pretrained(tmp_path)
    stored = adapter_shape(lora_job(tied_model, adapter_path=str(tmp_path)))
    asked = adapter_shape(lora_job(tied_model, rank=6, target_modules=["k_proj", "down_proj"]))
    assert stored is not None and asked is not None
    assert (stored.rank, set(stored.layers)) == (asked.rank, set(asked.layers))


def test_there_is_none_where_it_is_merged(tied_model: Path) -> None:
    spec = adapter_job(tied_model, "vllm")
    merging = spec.model.model_copy(update={"lora": Lora(merge=True)})
    assert adapter_shape(spec.model_copy(update={"model": merging})) is None


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"target_modules": ["lm_head"]},
            r"model\.lora\.merge: false: .*head, lm_head\. Fix: set model\.lora\.merge to",
        ),
        ({"target_modules": ["nothing"]}, r"model\.lora\.target_modules: \"nothing\": no linear layer .* that name"),
        ({"target_modules": ["q_proj", "v_prj"]}, r"target_modules: \"v_prj\": .* did you mean `v_proj`"),
        ({"adapter_path": "/nowhere"}, r"model\.lora\.adapter_path: .* there is no such folder"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_with_the_field(untied_model: Path, lora: Any, message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        adapter_shape(lora_job(untied_model, **lora))


def test_a_layer_without_a_place_in_any_worker_is_refused() -> None:
    first, second = SHAPE.layers[0].name, SHAPE.layers[1].name
    check_placed(SHAPE, "vLLM", [[first], [second]])
    with pytest.raises(InvalidJob, match=r"model\.lora\.merge: false: vLLM has no place for the adapter of q_proj"):
        check_placed(SHAPE, "vLLM", [[first], [first, second]])


def test_a_manifest_has_to_be_the_adapters() -> None:
    tensors = tensors_of(SHAPE)
    SHAPE.check(manifest_of(tensors), "float32")
    (name, *_) = tensors
    for wrong in (
        {n: t for n, t in tensors.items() if n != name},
        {**tensors, "base_model.model.other.lora_A.weight": tensors[name]},
        {**tensors, name: tensors[name].t()},
    ):
        with pytest.raises(PublicationFailed, match="1 tensors of the adapter differ"):
            SHAPE.check(manifest_of(wrong), "float32")
    with pytest.raises(PublicationFailed, match="10 tensors of the adapter differ"):
        SHAPE.check(manifest_of(tensors), "bfloat16")


@pytest.mark.e2e
@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (5, 8), (32, 32), (300, 320)])
def test_vllm_gets_a_slot_that_the_rank_fits_in(tied_model: Path, rank: int, slot: int) -> None:
    shape = AdapterShape(rank, SHAPE.layers)
    arguments = engine_arguments(adapter_job(tied_model, "vllm", rank=rank), shape)
    assert (arguments.enable_lora, arguments.max_loras, arguments.max_lora_rank) == (True, 1, slot)
    assert arguments.lora_target_modules == ["gate_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.e2e
def test_a_model_that_vllm_has_no_adapters_for_is_refused(tied_model: Path, tmp_path: Path) -> None:
    check_model(engine_arguments(adapter_job(tied_model, "vllm"), SHAPE).create_engine_config())
    BloomConfig(
        vocab_size=259, hidden_size=64, n_layer=1, n_head=4, architectures=["BloomForCausalLM"]
    ).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = engine_arguments(adapter_job(tmp_path, "vllm"), SHAPE).create_engine_config()
    with pytest.raises(InvalidJob, match=r"model\.lora\.merge: false: vLLM's BloomForCausalLM serves no adapters"):
        check_model(config)


@pytest.mark.e2e
def test_what_vllm_has_no_slot_for_is_refused(tied_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"model\.lora\.merge: false: vLLM serves ranks up to 512"):
        engine_arguments(adapter_job(tied_model, "vllm", rank=600), AdapterShape(600, SHAPE.layers))
    tiny.save("deepseek_v3", tmp_path)
    with pytest.raises(InvalidJob, match=r"model\.lora\.merge: false: .*kv_b_proj"):
        engine_arguments(adapter_job(tmp_path, "vllm"), SHAPE)


# Where a worker holds it.


def check_learned(slot: Any, shape: AdapterShape) -> LearnedLayout:
    """Learns the slot's layout, writes the adapter by it, and compares with what the slot's own loading writes."""
    tensors = tensors_of(shape)
    learned = learn_layout(slot.load, manifest_of(tensors), slot.loaded, slot.padded)
    assert not learned.loader_tensors and not learned.constant_writes
    memory = learned.memory
    boxes, names = memory.layout.boxes, list(tensors)
    for i in range(len(boxes)):
        box = tuple(slice(int(o), int(o + e)) for o, e in zip(boxes.offset[i], boxes.extent[i], strict=True))
        buffer = memory.buffers[int(memory.layout.buffer[i])]
        extent, strides = boxes.extent[i].tolist(), memory.layout.strides[i].tolist()
        source = tensors[names[boxes.tensor[i]]][box]
        torch.as_strided(buffer, extent, strides, int(memory.layout.start[i])).copy_(source)
    placed = {name: tensor.clone() for name, tensor in slot.loaded.items()}
    for tensor in slot.loaded.values():
        tensor.zero_()
    slot.load(tensors.items())
    assert all(torch.equal(placed[name], tensor) and tensor.all() for name, tensor in slot.loaded.items())
    return learned


class VllmManager(SimpleNamespace):
    """vLLM's manager of adapters with the real LoRA layers of one rank, as far as a slot uses it."""

    def __init__(self, rank: int, ranks: int, slot_rank: int) -> None:
        from vllm.lora.layers import (
            MergedColumnParallelLinearWithLoRA,
            MergedQKVParallelLinearWithLoRA,
            RowParallelLinearWithLoRA,
        )

        def layer(kind: type, inputs: int, outputs: tuple[int, ...], held: tuple[int, ...]) -> Any:
            made: Any = kind.__new__(kind)  # type: ignore[call-overload]
            nn.Module.__init__(made)
            made.tp_rank, made.tp_size = rank, ranks
            made.input_size, made.n_slices = inputs, len(outputs)
            made.output_sizes, made.output_slices, made.output_ids = outputs, outputs, held
            made.lora_a_stacked = tuple(torch.zeros(1, 1, slot_rank, inputs) for _ in outputs)
            made.lora_b_stacked = tuple(torch.zeros(1, 1, size, slot_rank) for size in outputs)
            return made

        kv_rank = rank * KV_HEADS // ranks
        kv = KV // min(ranks, KV_HEADS)
        self.modules = {
            f"{ATTENTION}.qkv_proj": layer(
                MergedQKVParallelLinearWithLoRA, HIDDEN, (Q // ranks, kv, kv), (rank, kv_rank, kv_rank)
            ),
            f"{ATTENTION}.o_proj": layer(RowParallelLinearWithLoRA, Q // ranks, (HIDDEN,), (0,)),
            f"{MLP}.gate_up_proj": layer(
                MergedColumnParallelLinearWithLoRA, HIDDEN, (INNER // ranks,) * 2, (rank, rank)
            ),
        }
        self.packed_modules = {
            f"{ATTENTION}.qkv_proj": [f"{ATTENTION}.{part}_proj" for part in "qkv"],
            f"{MLP}.gate_up_proj": [f"{MLP}.gate_proj", f"{MLP}.up_proj"],
        }
        self.model = nn.Module()
        self.lora_index_to_id: list[int | None] = [None]

    def activate_adapter(self, number: int) -> None:
        self.lora_index_to_id = [number]


def vllm_slot(rank: int, ranks: int, slot_rank: int = RANK) -> Any:
    manager = VllmManager(rank, ranks, slot_rank)
    worker = SimpleNamespace(_adapter_manager=manager, add_dummy_lora=lambda request, size: True)
    return vllm_adapter.AdapterSlot(worker, SHAPE, torch.float32)


class SglangLayer(SimpleNamespace):
    """A LoRA layer of SGLang as far as a slot uses it: rows of B, or columns of A, are divided over the ranks."""

    def slice_lora_a_weights(self, lora_a: torch.Tensor, rank: int) -> torch.Tensor:
        return lora_a[:, self.columns].contiguous() if self.columns is not None else lora_a

    def slice_lora_b_weights(self, lora_b: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.cat([lora_b[rows] for rows in self.rows])


def share(size: int, rank: int, ranks: int, first: int = 0) -> slice:
    return slice(first + rank * size // ranks, first + (rank + 1) * size // ranks)


def sglang_slot(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sglang_adapter, "lora_reference", lambda: "reference")
    copies = max(1, ranks // KV_HEADS)
    heads, groups = rank // copies, ranks // copies
    qkv_rows = [share(Q, rank, ranks), share(KV, heads, groups, Q), share(KV, heads, groups, Q + KV)]
    gate_up_rows = [share(INNER, rank, ranks), share(INNER, rank, ranks, INNER)]
    qkv_base = SimpleNamespace(num_kv_head_replicas=copies, output_sizes=[Q, KV * copies, KV * copies])
    modules = {
        f"{ATTENTION}.qkv_proj": SglangLayer(base_layer=qkv_base, columns=None, rows=qkv_rows),
        f"{ATTENTION}.o_proj": SglangLayer(base_layer=None, columns=share(Q, rank, ranks), rows=[slice(0, HIDDEN)]),
        f"{MLP}.gate_up_proj": SglangLayer(
            base_layer=SimpleNamespace(output_sizes=[INNER] * 2), columns=None, rows=gate_up_rows
        ),
    }
    sizes = {
        "qkv_proj": (3, HIDDEN, sum(each.stop - each.start for each in qkv_rows)),
        "o_proj": (1, Q // ranks, HIDDEN),
        "gate_up_proj": (2, HIDDEN, 2 * INNER // ranks),
    }
    pool = SimpleNamespace(
        A_buffer={kind: [torch.zeros(2, parts * RANK, inputs)] for kind, (parts, inputs, _) in sizes.items()},
        B_buffer={kind: [torch.zeros(2, outputs, RANK)] for kind, (_, _, outputs) in sizes.items()},
        uid_to_buffer_id={sglang_adapter.NAME: 1},
        tp_rank=rank,
    )
    manager = SimpleNamespace(
        memory_pool=pool,
        lora_modules=[modules],
        load_lora_adapter_from_tensors=lambda reference, tensors, config: SimpleNamespace(success=True),
        fetch_new_loras=lambda names: None,
    )
    return sglang_adapter.AdapterSlot(manager, SHAPE, torch.float32)


@pytest.mark.e2e
@pytest.mark.parametrize("slot_rank", [RANK, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vllms_ranks_hold_the_boxes_that_its_layers_slice(ranks: int, slot_rank: int) -> None:
    check_boxes([check_learned(vllm_slot(rank, ranks, slot_rank), SHAPE) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sglangs_ranks_hold_the_boxes_that_its_layers_slice(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_boxes([check_learned(sglang_slot(rank, ranks, monkeypatch), SHAPE) for rank in range(ranks)])


def check_boxes(learned: list[LearnedLayout]) -> None:
    """All ranks together hold every element, and each its share: where a layer's outputs are divided, a share of B's
    rows; where its inputs are, a share of A's columns; the other matrix whole."""
    tensors = tensors_of(SHAPE)
    held = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for each in learned:
        boxes = each.memory.layout.boxes
        assert len(boxes) == len(tensors)
        for tensor, offset, extent in zip(boxes.tensor, boxes.offset, boxes.extent, strict=True):
            name = list(tensors)[tensor]
            held[name][tuple(slice(int(o), int(o + e)) for o, e in zip(offset, extent, strict=True))] += 1
    ranks = len(learned)
    for name, count in held.items():
        divided = "lora_A" in name if "o_proj" in name else "lora_B" in name
        copies = max(1, ranks // KV_HEADS) if "v_proj" in name else 1
        assert (count == (copies if divided else ranks)).all(), name


def test_a_model_without_its_adapters_is_the_model_that_the_loader_knows() -> None:
    class Wrapper(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base

    whole: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 3))
    names = dict(whole.named_parameters())
    wrapped: Any
    kept, wrapped = whole[1], nn.Sequential(nn.Sequential(Wrapper(whole[0][0]), whole[0][1]), whole[1])
    base = without_adapters(wrapped, Wrapper)
    assert {name: id(p) for name, p in base.named_parameters()} == {name: id(p) for name, p in names.items()}
    assert base[1] is kept and isinstance(wrapped[0][0], Wrapper)
    assert without_adapters(whole, Wrapper) is whole
    assert "0.0.base_layer.weight" in dict(wrapped.named_parameters())
