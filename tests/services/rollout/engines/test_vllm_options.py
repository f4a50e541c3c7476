"""From a job spec to vLLM's arguments, without starting an engine."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from millrace.engines import ENGINES
from millrace.errors import InvalidJob, InvalidState
from services.rollout.engines import create, import_errors, probe
from services.rollout.engines.adapter import adapter_shape
from services.rollout.engines.options import has_latents
from services.rollout.engines.vllm.options import (
    check_api,
    check_model,
    engine_arguments,
)
from services.rollout.engines.vllm.worker import receiver_rank
from services.rollout.nodes.place import EngineStart
from tests.models import byte_tokenizer
from tests.services.rollout.jobs import adapter_job, job_spec
from tests.services.trainer.backends.megatron import tiny


def test_probe_imports_no_engine() -> None:
    code = (
        "import sys; from millrace.engines import ENGINES; from services.rollout.engines import probe\n"
        "found = {name: probe(name) for name in ENGINES}\n"
        "assert found['vllm'].ok and found['transformers'].ok, found\n"
        "assert not {'vllm', 'sglang', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert probe("vllm").release == ENGINES["vllm"].software.release


def test_an_engine_that_cannot_be_imported_is_told_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "vllm.outputs"):
        monkeypatch.setitem(sys.modules, name, None)
    told = r"engine: vllm: vLLM is installed and cannot be imported: .*--reinstall"
    with pytest.raises(InvalidState, match=told), import_errors("vllm"):
        asyncio.run(create("vllm").start(job_spec(tmp_path, "vllm")))


@pytest.mark.parametrize("found", ["0.26.0", "0.29.1", "0.32.0"])
def test_releases_that_were_tried_give_no_warning(found: str) -> None:
    assert ENGINES["vllm"].software.release_warning(found) == ""


@pytest.mark.parametrize("found", ["0.25.1", "0.33.0", "1.0.0", "dev"])
def test_other_releases_give_a_warning_that_names_them(found: str) -> None:
    assert found in ENGINES["vllm"].software.release_warning(found)


def test_a_missing_method_is_named() -> None:
    class Old:
        def generate(self) -> None: ...

    with pytest.raises(InvalidState, match=r"AsyncLLM\.resume_generation.*, AsyncMPClient\.pause_scheduler_async"):
        check_api(Old, Old)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_sequences": 4}, r"max_num_sequences: vLLM has no such option.*did you mean `max_num_seqs`"),
        ({"dtype": "bfloat16"}, r"dtype: a job cannot set this option.*rollout\.dtype"),
        ({"spec_tokens": 3}, r"spec_tokens: 3: publications do not reach the weights of a draft model"),
        ({"load_format": "auto"}, r"load_format: a job cannot set this option.*remove it"),
    ],
)
def test_wrong_options_are_named_with_the_fix(tied_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        engine_arguments(job_spec(tied_model, "vllm", rollout={"engine_options": options}))


@pytest.mark.e2e
def test_what_the_job_says_reaches_vllm(tied_model: Path) -> None:
    arguments = engine_arguments(job_spec(tied_model, "vllm", rollout={"engine_options": {"max_num_seqs": 5}}))
    assert (arguments.max_num_seqs, arguments.max_model_len, arguments.dtype) == (5, 400, "float32")
    assert (arguments.logprobs_mode, arguments.load_format) == ("processed_logprobs", "dummy")
    other = engine_arguments(job_spec(tied_model, "vllm"))
    assert arguments.seed != other.seed


@pytest.fixture(scope="module")
def on_latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    tiny.save("deepseek_v3", folder, served=True)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.e2e
def test_attention_on_latents_is_one_whose_weights_can_be_written(on_latents: Path, tied_model: Path) -> None:
    assert has_latents(str(on_latents)) and not has_latents(str(tied_model))
    config = engine_arguments(job_spec(on_latents, "vllm")).create_engine_config()
    check_model(config)
    assert config.attention_config.backend.name == "CPU_MLA"


@pytest.mark.e2e
def test_heads_without_a_kernel_are_refused_before_the_engine_dies(tmp_path: Path) -> None:
    """It died at the first request, three times, before the job failed."""
    config = {"model_type": "qwen3", "num_attention_heads": 4, "hidden_size": 64}
    for entries, size in ((config, 16), ({**config, "head_dim": 48}, 48), ({"text_config": config}, 16)):
        (tmp_path / "config.json").write_text(json.dumps(entries))
        with pytest.raises(InvalidJob, match=rf"model\.path: .*its heads have {size} values.*change head_dim"):
            engine_arguments(job_spec(tmp_path, "vllm"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 32}))
    engine_arguments(job_spec(tmp_path, "vllm"))


def test_weights_that_vllm_repacks_are_refused(on_latents: Path) -> None:
    packed = {"attention_config": {"backend": "AMX_MLA"}}
    arguments = engine_arguments(job_spec(on_latents, "vllm", rollout={"engine_options": packed}))
    with pytest.raises(InvalidJob, match=r"attention on latents by AMX_MLA, which vLLM repacks"):
        check_model(arguments.create_engine_config())


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_in_float32_is_refused_on_a_gpu(
    tied_model: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    spec = adapter_job(tied_model, "vllm", rollout={"dtype": dtype})
    config = engine_arguments(spec, adapter_shape(spec)).create_engine_config()
    check_model(config)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    if dtype == "bfloat16":
        check_model(config)
    else:
        with pytest.raises(InvalidJob, match=r"model\.lora\.merge.*rollout\.dtype is float32"):
            check_model(config)


ASKED_FOR = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("release", "on_gpus", "options", "fused"),
    [
        ("0.26.0", True, {"tensor_parallel_size": 2}, False),
        ("0.26.0", True, {"tensor_parallel_size": 2, **ASKED_FOR}, True),
        ("0.26.0", True, {}, None),
        ("0.26.0", False, {"tensor_parallel_size": 2}, None),
        ("0.27.0", True, {"tensor_parallel_size": 2}, None),
    ],
)
def test_a_fusion_that_needs_multicast_is_off_where_vllm_does_not_look_for_it(
    tied_model: Path,
    release: str,
    on_gpus: bool,
    options: dict[str, Any],
    fused: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None leaves it to vLLM."""
    import vllm
    from vllm.platforms import current_platform

    monkeypatch.setattr(vllm, "__version__", release)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: not on_gpus)
    arguments = engine_arguments(job_spec(tied_model, "vllm", rollout={"engine_options": options}))
    assert arguments.compilation_config.pass_config.fuse_allreduce_rms is fused


def test_a_nodes_share_of_the_workers(tied_model: Path) -> None:
    start = EngineStart(1, 2, "10.0.0.1", 25000, 7, "tcp://")
    spec = job_spec(tied_model, "vllm", rollout={"engine_options": {"tensor_parallel_size": 2}})
    arguments = engine_arguments(spec, None, start)
    assert (arguments.nnodes, arguments.node_rank, arguments.seed) == (2, 1, 7)
    assert (arguments.master_addr, arguments.master_port) == ("10.0.0.1", 25000)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size: 3: 3 workers do not divide evenly into the 2 nodes"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, r"distributed_executor_backend: \"ray\""),
        ({"tensor_parallel_size": 2, "nnodes": 2}, r"nnodes: a job cannot set this option"),
        (
            {"data_parallel_size": 2},
            r"data_parallel_size: 2: several data-parallel ranks .* a replica over several hosts",
        ),
    ],
)
def test_what_does_not_lie_over_nodes_is_refused(tied_model: Path, options: dict[str, Any], said: str) -> None:
    start = EngineStart(1, 2, "10.0.0.1", 25000, 7, "tcp://")
    with pytest.raises(InvalidJob, match=said):
        engine_arguments(job_spec(tied_model, "vllm", rollout={"engine_options": options}), None, start)


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    tiny.save("qwen3_moe", folder, served=True)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.e2e
def test_experts_lie_over_the_workers_of_all_data_parallel_ranks(with_experts: Path) -> None:
    """A worker's number in publications is the one by which vLLM gives it its experts."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    options = {"data_parallel_size": 3, "tensor_parallel_size": 2}
    spec = job_spec(with_experts, "vllm", rollout={"engine_options": options})
    config = engine_arguments(spec).create_engine_config()
    check_model(config)
    parallel = config.parallel_config
    assert (parallel.enable_expert_parallel, parallel.data_parallel_size, parallel.world_size) == (True, 3, 2)
    numbers = []
    for parallel.data_parallel_rank in range(3):
        for rank in range(2):
            flat = FusedMoEParallelConfig.flatten_tp_across_dp_and_pcp
            with patch("vllm.model_executor.layers.fused_moe.config.get_tensor_model_parallel_rank", lambda r=rank: r):
                size, of_experts = flat(2, 3, parallel.data_parallel_rank, 1, 0)
            assert (size, of_experts) == (6, receiver_rank(rank, parallel))
            numbers.append(of_experts)
    assert numbers == list(range(6))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_expert_parallel": False}, r"experts that lie over each rank's workers alone"),
        ({"pipeline_parallel_size": 2}, r"pipeline stages"),
    ],
)
def test_what_was_not_shown_on_several_ranks_is_refused_by_name(
    with_experts: Path, options: dict[str, Any], said: str
) -> None:
    options = {"vllm": {"data_parallel_size": 2, **options}}
    spec = job_spec(with_experts, "vllm", rollout={"engine_options": options})
    with pytest.raises(InvalidJob, match=rf"rollout\.engine_options\.vllm\.data_parallel_size: 2: .*{said}"):
        engine_arguments(spec)


@pytest.mark.e2e
def test_adapters_of_their_own_are_refused_on_several_ranks(with_experts: Path) -> None:
    spec = adapter_job(with_experts, "vllm", rollout={"engine_options": {"data_parallel_size": 2}}, targets=["q_proj"])
    with pytest.raises(InvalidJob, match=r"data_parallel_size: 2: .*model\.lora\.merge: false"):
        engine_arguments(spec, adapter_shape(spec))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "said"), [({}, "no experts, to lie over 2"), ({"tensor_parallel_size": 5}, "8 experts, to lie over 10")]
)
def test_every_worker_of_several_ranks_has_experts(
    tied_model: Path, with_experts: Path, options: dict[str, Any], said: str
) -> None:
    options = {"data_parallel_size": 2, **options}
    spec = job_spec(with_experts if "8" in said else tied_model, "vllm", rollout={"engine_options": options})
    with pytest.raises(InvalidJob, match=rf"data_parallel_size: 2: the model has {said} workers"):
        engine_arguments(spec)
