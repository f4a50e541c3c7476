"""Every ready job spec is valid, has the sizes of verl's tables, and fits the model and the GPUs that it names."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.shapes import config_of
from millrace.admission import choices
from millrace.backends.megatron import parse
from millrace.megatron.architectures import read_shape
from millrace.megatron.architectures.published import PUBLISHED
from millrace.megatron.rules import broken_rules, check_adapter
from millrace.megatron.weights import TRANSFORMER_ENGINE
from millrace.memory.ledger import peak
from millrace.memory.prediction import predict, predict_replica
from millrace.memory.shape import decoder_shape
from millrace.memory.text import fits
from millrace.spec import JobSpec, load
from tests.megatron import configs

PRESETS = Path(__file__).parents[2] / "presets"
FILES = sorted(PRESETS.glob("*.yaml"))
GB = 1e9
QWEN3_235B_A22B = {
    **configs.QWEN3_30B_A3B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
DENSE = {
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
}
QWEN3_8B = {
    **DENSE,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN2_72B = {
    **DENSE,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "vocab_size": 152064,
}
MODELS = {
    "qwen2.5-72b-lora": QWEN2_72B,
    "qwen2.5-vl-7b-lora": config_of(PUBLISHED["qwen2.5-vl-7b"]),
    "qwen3-8b": QWEN3_8B,
    "qwen3-8b-lora": QWEN3_8B,
    "qwen3-8b-lora-from-adapter": QWEN3_8B,
    "qwen3-30b-a3b-lora": configs.QWEN3_30B_A3B,
    "qwen3-30b-a3b": configs.QWEN3_30B_A3B,
    "qwen3-235b-a22b": QWEN3_235B_A22B,
    "deepseek-v3": configs.DEEPSEEK_V3,
    "deepseek-v3-dapo": configs.DEEPSEEK_V3,
}
TABLES = {
    "deepseek-v3-96gpu": (8, 12, 8, 1.0, False, 6),
    "deepseek-v3-128gpu": (8, 16, 8, 0.5, True, 1),
    "deepseek-v3-256gpu": (8, 16, 8, 0.0, True, 1),
    "deepseek-v3-512gpu": (1, 16, 32, 0.0, True, 1),
    "deepseek-v3-dapo-512gpu": (1, 16, 32, 0.0, True, 1),
    "qwen3-235b-a22b-32gpu": (4, 8, 4, 1.0, False, 6),
    "qwen3-235b-a22b-64gpu": (4, 8, 4, 0.5, True, 6),
    "qwen3-235b-a22b-128gpu": (4, 8, 4, 0.0, True, 6),
    "qwen3-235b-a22b-256gpu": (4, 8, 4, 0.0, True, 6),
    "qwen3-30b-a3b-8gpu": (1, 1, 8, 1.0, True, None),
    "qwen3-30b-a3b-16gpu": (1, 1, 8, 1.0, True, None),
    "qwen3-30b-a3b-32gpu": (1, 1, 8, 1.0, True, None),
}
"""verl's page on large models with experts: TP, PP, EP, OFFLOAD_FRACTION, OFFLOAD_OPTIM, LAST_LAYER."""


def named(file: Path, pattern: str) -> int:
    """A number that the file's first line names."""
    found = re.search(pattern, file.read_text().splitlines()[0])
    assert found is not None, pattern
    return int(found[1])


def model_folder(spec: JobSpec, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(MODELS[spec.name]))
    return folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_ready_job_is_valid_and_fits_its_cluster(file: Path, tmp_path: Path) -> None:
    spec = load(file)
    choices.check(spec)
    found = re.fullmatch(r"(.+)-(\d+)gpu", file.stem)
    assert found is not None and found[1] == spec.name
    trainer_gpus = named(file, r"on (\d+) trainer GPUs")
    first = file.read_text().splitlines()[0]
    assert found[2] in (str(trainer_gpus), *re.findall(r"(\d+) on two hosts", first))
    if spec.trainer.backend == "megatron":
        options = parse(spec.trainer.backend_options)
        shape = read_shape(model_folder(spec, tmp_path))
        assert broken_rules(options, shape, trainer_gpus, cuda=True) == []
        assert spec.model.lora is None or check_adapter(spec.model.lora, options, shape, TRANSFORMER_ENGINE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_ready_job_fits_the_gpus_that_it_names(file: Path, tmp_path: Path) -> None:
    spec = load(file)
    gpu_bytes, ranks = named(file, r"of (\d+) GB") * GB, named(file, r"on (\d+) trainer GPUs")
    shape = decoder_shape(model_folder(spec, tmp_path))
    trainer, replica = peak(predict(spec, shape, ranks)).total, predict_replica(spec, shape, "vllm", gpu_bytes)
    assert fits(trainer, gpu_bytes)
    assert replica.ledger.total <= gpu_bytes and replica.cached_tokens > spec.rollout.engine_options["max_model_len"]
    if "--share-gpus" in file.read_text():
        assert fits(trainer + replica.ledger.total, gpu_bytes)
    page = (PRESETS / "README.md").read_text()
    row = re.search(rf"\({re.escape(file.name)}\).*\| (\d+) \|\n", page)
    assert row is not None and int(row[1]) == round(trainer / GB)


@pytest.mark.parametrize("name", TABLES)
def test_the_sizes_are_those_of_the_tables(name: str) -> None:
    options = parse(load(PRESETS / f"{name}.yaml").trainer.backend_options)
    sizes = (options.tensor_parallel, options.pipeline_parallel, options.expert_parallel)
    offloaded = (options.optimizer_offload_fraction, options.offload_optimizer)
    assert (*sizes, *offloaded, options.last_stage_layers) == TABLES[name]


@pytest.mark.parametrize("file", [file for file in FILES if "deepseek" in file.stem], ids=lambda file: file.stem)
def test_replicas_of_deepseek_lie_on_four_hosts(file: Path) -> None:
    assert load(file).rollout.engine_options["tensor_parallel_size"] == 32
    assert "32 GPUs a replica" in file.read_text()


def test_the_page_lists_every_file() -> None:
    page = (PRESETS / "README.md").read_text()
    assert set(re.findall(r"\]\(([\w.-]+\.yaml)\)", page)) == {file.name for file in FILES}
