"""The prediction beside the peaks that BENCHMARKS.md measured, and beside real models' parameters."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.frozen_head import frozen_head_gradient
from millrace.errors import InvalidJob, InvalidState
from millrace.megatron.architectures.published import shape_of
from millrace.memory.layers import layer_parameters, vocabulary_parameters
from millrace.memory.ledger import GB, Part, Phase, peak
from millrace.memory.prediction import cache_bytes_per_token, predict, predict_replica, state_bytes_per_request
from millrace.memory.shape import decoder_shape
from millrace.memory.staging import published_bytes
from millrace.memory.text import replica_lines
from tests.hybrid_models import SIZES
from tests.memory.jobs import cut, job

GIB = 1.073741824
FULL = {"recompute": {"granularity": "full"}}
CHUNK = {"logprob_chunk_tokens": 4096}
SMALL_VOCABULARY = cut("qwen3-1.7b", 28, 512)
EP2 = {"expert_parallel": 2}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute": {"granularity": "selective", "modules": list(modules)}}


def megatron(**options: Any) -> Any:
    """A job of the table "The megatron backend on GPUs"."""
    return job("megatron", {**CHUNK, **options})


BESIDE = (
    (SMALL_VOCABULARY, job(), 1, 16384, 56.0),
    (cut("qwen3-8b", 12), job(), 1, 16384, 91.0),
    (cut("qwen3-30b-a3b", 6), job(), 1, 16384, 91.0),
    (SMALL_VOCABULARY, job("megatron"), 1, 16384, 59.0),
    (cut("qwen3-8b", 12), job("megatron"), 1, 16384, 96.0),
    (cut("qwen3-30b-a3b", 6), job("megatron"), 1, 16384, 93.0),
    (cut("qwen3-8b", 36), job(activation_recompute=True), 1, 16384, 146.0),
    (cut("qwen3-8b", 36), job(lora={"rank": 32}), 1, 16384, 106.0),
    (SMALL_VOCABULARY, job(), 1, 32768, 90.2),
    (cut("qwen3-8b", 12), job(), 1, 32768, 119.4),
    (cut("qwen3-30b-a3b", 6), job(), 1, 32768, 104.4),
    (SMALL_VOCABULARY, job("megatron"), 1, 32768, 92.5),
    (cut("qwen3-8b", 12), job("megatron"), 1, 32768, 123.5),
    (cut("qwen3-30b-a3b", 6), job("megatron"), 1, 32768, 104.8),
)
"""Shape, job, GPUs, tokens of a micro-batch and peak in GB of "FSDP2 beside Megatron-Core"."""
ALONE = (
    (cut("qwen3-8b", 12), megatron(**selective("core_attn")), 1, 16384, 93.3),
    (cut("qwen3-8b", 12), megatron(fused_gradients=False), 1, 16384, 91.4),
    (cut("qwen3-8b", 12), megatron(**selective("mlp", "layernorm")), 1, 16384, 76.4),
    (cut("qwen3-8b", 12), megatron(**FULL), 1, 16384, 67.8),
    (cut("qwen3-8b", 4), megatron(), 1, 16384, 48.8),
    (cut("qwen3-8b", 4), megatron(optimizer_offload_fraction=0.5), 1, 16384, 41.2),
    (cut("qwen3-8b", 4), megatron(optimizer_offload_fraction=1.0), 1, 16384, 26.2),
    (cut("qwen3-8b", 36), megatron(**FULL), 2, 16384, 102.6),
    (cut("qwen3-8b", 36), megatron(pipeline_parallel=2, **FULL), 2, 4096, 74.2),
    (cut("qwen3-8b", 16), megatron(context_parallel=2), 2, 32768, 88.6),
    (cut("qwen3-30b-a3b", 6), megatron(), 1, 16384, 88.8),
    (cut("qwen3-30b-a3b", 6), megatron(**FULL), 1, 16384, 78.7),
    (cut("qwen3-30b-a3b", 10), megatron(**EP2), 2, 16384, 83.3),
    (cut("qwen3-30b-a3b", 10), megatron(**EP2), 2, 16384, 82.5),
    (cut("qwen3-30b-a3b", 10), megatron(**EP2), 2, 32768, 100.5),
    (cut("qwen3-30b-a3b", 8), megatron(**EP2), 2, 65536, 114.3),
)
"""The same of "The megatron backend on GPUs", in GiB."""
EIGHT = cut("qwen3-8b", 8)
LORA, OFFLOADED, IN_HOST = {"rank": 32}, {"offload_activations": True}, {"offload_parameters": True}
BY_SWITCH = tuple(
    (EIGHT, spec, 1, 16384, gib)
    for spec, gib in (
        (job(), 65.1),
        (job(activation_recompute=True), 55.5),
        (job(options=OFFLOADED), 55.5),
        (job(options=OFFLOADED, activation_recompute=True), 55.5),
        (job(lora=LORA), 28.9),
        (job(lora=LORA, activation_recompute=True), 13.2),
        (job(options=IN_HOST, lora=LORA, activation_recompute=True), 7.7),
        (job(options=IN_HOST), 23.6),
        (job("megatron"), 68.1),
        (job("megatron", activation_recompute=True), 52.3),
        (job("megatron", selective("mlp", "layernorm")), 58.1),
        (job("megatron", {"optimizer_moments": "bfloat16"}), 58.8),
        (job("megatron", lora=LORA), 27.0),
        (job("megatron", {"optimizer_offload_fraction": 1.0}), 37.0),
    )
)
"""The same of "Memory, predicted and measured"."""
WHOLE = tuple(
    (cut(shape, layers), spec, 1, 16384, gib)
    for shape, layers, spec, gib in (
        ("qwen3-8b", 36, job(activation_recompute=True), 136.0),
        ("qwen3-8b", 36, job(options={"offload_optimizer": True}, activation_recompute=True), 75.0),
        ("qwen3-8b", 36, job(lora=LORA), 98.9),
        ("qwen3-8b", 36, job(lora=LORA, activation_recompute=True), 27.8),
        ("qwen3-8b", 36, job(options=IN_HOST, lora=LORA, activation_recompute=True), 11.2),
        ("qwen3-32b", 64, job(lora=LORA, activation_recompute=True), 86.7),
    )
)
"""The same of its table "Whole models"."""
MEASURED = (*BESIDE, *((*case, gib * GIB) for *case, gib in (*ALONE, *BY_SWITCH, *WHOLE)))


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_peak_is_within_five_percent_of_what_was_measured(case: Any) -> None:
    shape, spec, ranks, tokens, measured_gb = case
    with frozen_head_gradient():
        assert peak(predict(spec, shape, ranks, tokens)).total / GB == pytest.approx(measured_gb, rel=0.05)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_frozen_head_has_no_gradient(backend: str) -> None:
    """3.5 GiB of the 8B shape: its head has 152 thousand · 4,096 weights, of 4 bytes in float32 and 2 in bfloat16."""
    spec = job(backend, lora=LORA)
    now = predict(spec, EIGHT, 1)[Phase.UPDATE]
    with frozen_head_gradient():
        then = predict(spec, EIGHT, 1)[Phase.UPDATE]
    gradient = 6 * EIGHT.padded_vocabulary(1) * EIGHT.hidden
    assert then.device[Part.LOGITS] - now.device[Part.LOGITS] == gradient == pytest.approx(3.48 * GIB * GB, rel=0.01)
    trained = predict(job(backend), EIGHT, 1, 1024)
    with frozen_head_gradient():
        assert predict(job(backend), EIGHT, 1, 1024) == trained


@pytest.mark.parametrize("phase", [Phase.SCORING, Phase.UPDATE])
def test_logits_that_exist_whole_are_predicted_whole(phase: Phase) -> None:
    """Of bfloat16, 2 bytes; logits and a copy or their gradient."""
    on_head = job(lora={"rank": 32, "target_modules": ["q_proj", "lm_head"]})
    encoder = replace(EIGHT, architecture="roberta")
    for spec, shape in ((on_head, EIGHT), (job(lora=LORA), encoder)):
        found = predict(spec, shape, 1, 16384)[phase].device
        assert found[Part.LOGITS] == 2 * 2 * 16384 * shape.vocabulary
    chunks = predict(job(lora=LORA), EIGHT, 1, 16384)[Phase.SCORING].device
    assert chunks[Part.LOGITS] == 2 * 2 * 1024 * EIGHT.vocabulary


@pytest.mark.parametrize(("size", "measured_gb"), [(1, 60.3), (2, 44.3)])
def test_shared_micro_batches_are_within_ten_percent_of_what_was_measured(size: int, measured_gb: float) -> None:
    """Of "Shared micro-batches". An update had one micro-batch there: when activations are the most, no gradients of
    earlier micro-batches are there yet."""
    spec = job(options={"sequence_parallel_size": size}, activation_recompute=True)
    ledger = predict(spec, cut("qwen3-8b", 12), 2, 131072)[Phase.UPDATE]
    assert (ledger.total - ledger.device[Part.GRADIENTS]) / GB == pytest.approx(measured_gb, rel=0.1)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
@pytest.mark.parametrize(
    ("role", "algorithm", "phase"),
    [
        ("reference", {"kl": {"name": "k1"}}, Phase.SCORING),
        ("critic", {"preset": "ppo"}, Phase.SCORING),
        ("critic", {"preset": "ppo"}, Phase.UPDATE),
    ],
)
def test_a_roles_own_token_budget_counts(backend: str, role: str, algorithm: dict[str, Any], phase: Phase) -> None:
    shape = cut("qwen3-8b", 12)
    found = [
        predict(job(backend, algorithm=algorithm, **own), shape, 1, 16384)[phase].total
        for own in ({}, {role: {"token_budget": 4 * 16384}}, {role: {"token_budget": 2048}})
    ]
    assert found[1] > 1.04 * found[0] and found[2] <= found[0]


def test_a_role_divides_its_own_micro_batch() -> None:
    shape, budget = cut("qwen3-8b", 12), {"token_budget": 4 * 16384}
    found = {}
    for size in (1, 4):
        own = {**budget, "backend_options": {"sequence_parallel_size": size}}
        spec = job(options={"sequence_parallel_size": 4}, algorithm={"kl": {"name": "k1"}}, reference=own)
        found[size] = predict(spec, shape, 4)[Phase.SCORING].device[Part.ACTIVATIONS]
    assert found[1] == pytest.approx(4 * found[4])


def test_ranks_divide_what_they_share() -> None:
    shape = cut("qwen3-8b", 12)
    one, eight = (predict(job(), shape, ranks)[Phase.UPDATE].device for ranks in (1, 8))
    for part in (Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER):
        assert eight[part] == pytest.approx(one[part] / 8)
    assert eight[Part.ACTIVATIONS] == one[Part.ACTIVATIONS]


def test_ranks_that_share_a_micro_batch_divide_its_activations() -> None:
    shape = cut("qwen3-8b", 12)
    alone, shared = (
        predict(job(options={"sequence_parallel_size": size}), shape, 4)[Phase.UPDATE].device for size in (1, 4)
    )
    assert shared[Part.ACTIVATIONS] == pytest.approx(alone[Part.ACTIVATIONS] / 4)
    assert shared[Part.WEIGHTS] == alone[Part.WEIGHTS]
    with pytest.raises(InvalidJob, match="32 attention heads"):
        predict(job(options={"sequence_parallel_size": 3}), shape, 3)


def test_offloaded_parts_are_in_host_memory() -> None:
    shape = cut("qwen3-8b", 12)
    plain = predict(job(algorithm={"kl": {"name": "k1"}}), shape, 1)[Phase.UPDATE]
    options = {"offload_parameters": True}
    offloaded = predict(job(options=options, algorithm={"kl": {"name": "k1"}}), shape, 1)[Phase.UPDATE]
    assert set(offloaded.host) == {Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.REFERENCE}
    assert sum(offloaded.host.values()) == pytest.approx(plain.total - offloaded.total)


def test_two_layers_of_offloaded_activations_are_on_the_gpu() -> None:
    shape = cut("qwen3-8b", 12)
    kept, offloaded = (
        predict(job(options={"offload_activations": on}, token_budget=65536), shape, 1)[Phase.UPDATE]
        for on in (False, True)
    )
    assert offloaded.device[Part.ACTIVATIONS] == pytest.approx(kept.device[Part.ACTIVATIONS] / 6)
    assert offloaded.host[Part.ACTIVATIONS] == pytest.approx(kept.device[Part.ACTIVATIONS] * 5 / 6)


def test_megatrons_weights_are_in_host_memory_between_phases() -> None:
    found = predict(job("megatron", {"offload_parameters": True}), cut("qwen3-8b", 12), 1)
    plain = predict(job("megatron"), cut("qwen3-8b", 12), 1)
    assert Part.WEIGHTS not in found[Phase.LOAD].device
    assert found[Phase.LOAD].host[Part.WEIGHTS] == plain[Phase.LOAD].device[Part.WEIGHTS]
    assert found[Phase.UPDATE].device == plain[Phase.UPDATE].device


def test_gradients_exist_during_an_update_only() -> None:
    found = predict(job(), cut("qwen3-8b", 12), 1)
    assert [phase for phase, ledger in found.items() if ledger.device.get(Part.GRADIENTS)] == [Phase.UPDATE]


def test_the_first_pipeline_stage_keeps_more_activations_and_the_last_has_the_head() -> None:
    shape = cut("qwen3-8b", 36)
    found = predict(job("megatron", {"pipeline_parallel": 4}), shape, 4)[Phase.UPDATE].device
    alone = predict(job("megatron"), shape, 1)[Phase.UPDATE].device
    assert found[Part.ACTIVATIONS] == pytest.approx(alone[Part.ACTIVATIONS])
    assert Part.LOGITS not in found


def test_a_number_of_gpus_that_the_options_do_not_allow_is_refused() -> None:
    with pytest.raises(InvalidState, match="3 GPUs of the trainer: the job's options need a multiple of 2"):
        predict(job("megatron", {"tensor_parallel": 2}), cut("qwen3-8b", 12), 3)
    with pytest.raises(InvalidJob):
        predict(job("megatron", {"tensor_parallel": 64}), cut("qwen3-8b", 12), 64)


def test_a_replica_keeps_keys_and_values_in_what_is_left() -> None:
    shape, gpu = cut("qwen3-8b", 36), 80 * (1 << 30)
    assert cache_bytes_per_token(job(), shape) == 2 * 36 * 8 * 128 * 2
    half = predict_replica(job(rollout={"engine_options": {"gpu_memory_utilization": 0.5}}), shape, "vllm", gpu)
    whole = predict_replica(job(), shape, "vllm", gpu)
    assert whole.ledger.device[Part.KV_CACHE] - half.ledger.device[Part.KV_CACHE] == pytest.approx(0.4 * gpu)
    assert whole.cached_tokens > 2 * half.cached_tokens > 0
    assert half.ledger.device[Part.STAGING] > whole.ledger.device[Part.STAGING]  # a whole version fits beside it
    two = predict_replica(job(rollout={"engine_options": {"tensor_parallel_size": 2}}), shape, "vllm", gpu)
    assert two.workers == 2 and two.ledger.device[Part.WEIGHTS] == whole.ledger.device[Part.WEIGHTS] / 2


def test_experts_over_all_ranks_are_there_once_and_the_rest_in_each_rank() -> None:
    shape, gpu = cut("qwen3-30b-a3b", 4), 80 * (1 << 30)
    parts = [layer_parameters(shape, layer) for layer in range(4)]
    dense, experts = sum(part.dense for part in parts), sum(part.experts for part in parts)
    dense += vocabulary_parameters(shape)
    options = {"tensor_parallel_size": 2, "data_parallel_size": 4}
    wide = predict_replica(job(rollout={"engine_options": options}), shape, "vllm", gpu)
    assert wide.workers == 8
    assert wide.ledger.device[Part.WEIGHTS] == pytest.approx(2 * (dense / 2 + experts / 8), rel=1e-4)
    one = predict_replica(job(rollout={"engine_options": {"tensor_parallel_size": 2}}), shape, "vllm", gpu)
    assert wide.cached_tokens > 4 * one.cached_tokens > 0


@pytest.mark.parametrize(("dtype", "stated"), [("bfloat16", None), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_request_keeps_states_where_layers_are_recurrent(dtype: str, stated: str | None, tmp_path: Path) -> None:
    """The states have the sizes that vLLM gives them."""
    mamba = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
    text: dict[str, Any] = {**SIZES, "mamba_ssm_dtype": stated}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    shape, spec = decoder_shape(tmp_path), job(rollout={"dtype": dtype})
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    dtypes = mamba.MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        getattr(torch, dtype), "auto", stated or "auto"
    )
    for workers in (1, 2):
        sizes = (SIZES[f"linear_{name}"] for name in names)
        shapes = mamba.MambaStateShapeCalculator.gated_delta_net_state_shape(workers, *sizes)
        layer = sum(math.prod(each) * kind.itemsize for each, kind in zip(shapes, dtypes, strict=True))
        assert state_bytes_per_request(spec, shape, workers) == 2 * layer
    assert cache_bytes_per_token(spec, shape) == 2 * 2 * 2 * 32 * getattr(torch, dtype).itemsize
    replica = predict_replica(spec, shape, "vllm", 80e9)
    assert replica.state_bytes == state_bytes_per_request(spec, shape)
    lines = list(replica_lines(replica, 80e9))
    (number,) = (n for n, line in enumerate(lines) if "in recurrent layers" in line)
    assert "keys and values" in lines[number - 1]


def test_a_publication_of_an_adapter_alone_needs_no_room_for_the_weights() -> None:
    shape, gpu = cut("qwen3-8b", 36), 141 * (1 << 30)
    staging = {}
    for merge in (False, True):
        spec = job(lora={"rank": 32, "merge": merge}, rollout={"engine_options": {"gpu_memory_utilization": 0.5}})
        staging[merge] = predict_replica(spec, shape, "vllm", gpu).ledger.device[Part.STAGING]
    assert staging[False] == pytest.approx(2 * 87e6, rel=0.01) and staging[True] == pytest.approx(2 * 8.19e9, rel=0.01)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_changes_alone_need_host_memory_for_what_was_sent(backend: str) -> None:
    spec, host = job(backend), {}
    for path in ("sharded", "delta"):
        publication = spec.publication.model_copy(update={"path": path})
        asked = spec.model_copy(update={"publication": publication})
        host[path] = sum(predict(asked, cut("qwen3-8b", 36), 8)[Phase.PUBLICATION].host.values())
    assert host["sharded"] == 0 and host["delta"] == pytest.approx(2 * 8.19e9 / 8, rel=0.01)


def test_whole_tensors_are_counted_in_the_host_memory_of_each_worker() -> None:
    spec, shape = job(rollout={"engine_options": {"tensor_parallel_size": 2}}), shape_of("qwen3-8b")
    by_shards = predict_replica(spec, shape, "vllm", 80e9).ledger
    whole = spec.model_copy(update={"publication": spec.publication.model_copy(update={"path": "gather_broadcast"})})
    gathered = predict_replica(whole, shape, "vllm", 80e9)
    assert sum(by_shards.host.values()) == 0
    assert gathered.ledger.host[Part.STAGING] == published_bytes(spec, shape)
    assert gathered.ledger.device[Part.STAGING] == 2 * shape.vocabulary * shape.hidden  # one tensor at a time
    assert any(line.startswith("  in host memory") for line in replica_lines(gathered, 80e9))
