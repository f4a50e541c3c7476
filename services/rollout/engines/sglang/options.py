"""From a job spec to SGLang's server arguments. Options with which samples or weights would be wrong are refused."""

import dataclasses
import json
import secrets
from typing import Any

from millrace.data.quantization import engine_overrides
from millrace.engines import ENGINES
from millrace.engines.sglang import unequal
from millrace.errors import InvalidState, refused
from millrace.spec import JobSpec
from services.rollout.engines.adapter import AdapterShape, not_served
from services.rollout.engines.options import check_names, has_latents, read_text_config, refuse_recurrent
from services.rollout.engines.sglang.adapter import SLOTS
from services.rollout.nodes.place import EngineStart

MARK = "millrace_version"
"""Key under which SGLang returns the version marks, one for each token."""
SLACK = 8
"""Tokens by which SGLang's context is longer than the job's: it ends a response a few tokens before its context."""


def server_arguments(
    spec: JobSpec, adapter: AdapterShape | None = None, start: EngineStart | None = None
) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`, for a job and the adapter that every request uses. `start`: this node's
    start, for an engine on several hosts. Raises InvalidJob for an option that SGLang does not take."""
    if spec.rollout.dtype == "float32":
        reason = "SGLang's kernels are for bfloat16 and float16"
        raise refused("rollout.dtype", "float32", reason, "set rollout.dtype to bfloat16, or use another engine.")
    if spec.algorithm.router_replay:
        reason = "replicas with SGLang do not report the experts of a token"
        raise refused("algorithm.router_replay", True, reason, "use vLLM, or leave it out.")
    refuse_recurrent(spec.model.path, "SGLang")
    _refuse_unequal(spec)
    from sglang.srt.server_args import ServerArgs

    options = spec.rollout.options_of("sglang")
    known = {field.name for field in dataclasses.fields(ServerArgs)}
    check_names(spec, "sglang", known, "ServerArgs")
    return {
        "context_length": context(spec) + SLACK,
        "log_level": "warning",
        **options,
        **config_overrides(spec.model.path, options.get("json_model_override_args")),
        **({} if adapter is None else _adapter_arguments(spec, adapter)),
        "model_path": spec.model.path,
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": spec.rollout.dtype,
        # A publication comes before the first request, so reading the checkpoint would be wasted time.
        "load_format": "dummy",
        # worker.py registers its own sampler under this name.
        "sampling_backend": "pytorch",
        # Replicas must not draw the same random numbers; the ranks of one replica must.
        "random_seed": secrets.randbits(30),
        **({} if start is None else _node_arguments(spec, start)),
    }


def _refuse_unequal(spec: JobSpec) -> None:
    """Raises InvalidJob for a model that SGLang computes otherwise than the trainer does."""
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    if reason := unequal(read_text_config(spec.model.path), longest):
        raise refused("model.path", spec.model.path, reason, "start replicas with another engine.")


def _node_arguments(spec: JobSpec, start: EngineStart) -> dict[str, Any]:
    """Server arguments for one node's share of the engine. Raises InvalidJob if the schedulers do not divide into
    nodes."""
    ranks = int(spec.rollout.options_of("sglang").get("tp_size") or 1)
    if ranks % start.nodes:
        reason = f"{ranks} schedulers do not divide evenly into the {start.nodes} nodes of this replica"
        fix = f"choose a multiple of {start.nodes}."
        raise refused(spec.rollout.field_of("sglang", "tp_size"), ranks, reason, fix)
    return {
        "nnodes": start.nodes,
        "node_rank": start.rank,
        "dist_init_addr": f"{start.host}:{start.port}",
        "random_seed": start.seed,
    }


def _adapter_arguments(spec: JobSpec, adapter: AdapterShape) -> dict[str, Any]:
    """Server arguments for a place for the adapter, of its rank. Raises InvalidJob for one that SGLang cannot serve."""
    if has_latents(spec.model.path):
        raise not_served("SGLang computes with kv_b_proj folded into other weights, without its adapter")
    return {
        "enable_lora": True,
        "max_lora_rank": adapter.rank,
        "lora_target_modules": adapter.kinds,
        "max_loras_per_batch": SLOTS,
    }


def config_overrides(model: str, asked: str | None) -> dict[str, str]:
    """The argument of SGLang for changes of a model folder's config: those that the job asked for, and that parameters
    are not quantized. Empty if there is nothing to change."""
    changes = {**json.loads(asked or "{}"), **engine_overrides(model)}
    return {"json_model_override_args": json.dumps(changes)} if changes else {}


def context(spec: JobSpec) -> int:
    """Largest number of tokens of a prompt and its response together."""
    asked = spec.rollout.options_of("sglang").get("context_length")
    return int(asked) if asked else spec.data.max_prompt_tokens + spec.rollout.max_response_tokens


def check_model(model_config: Any) -> None:
    """Raises InvalidJob for a model whose parameters SGLang transforms after loading: a published version would
    overwrite the transformed ones. `model_config` is SGLang's ModelConfig."""
    if getattr(model_config, "quantization", None):
        reason = "the model has quantized weights, which SGLang repacks"
        raise refused("model.path", model_config.model_path, reason, "use a model without quantized weights.")


def check_api() -> None:
    """Raises InvalidState naming what this SGLang lacks."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.layers import sampler
    from sglang.srt.managers import io_struct, scheduler, tokenizer_manager

    needed = {
        "Engine.run_scheduler_process_func": hasattr(Engine, "run_scheduler_process_func"),
        "layers.sampler.register_sampler_backend": hasattr(sampler, "register_sampler_backend"),
        "io_struct.PauseGenerationReqInput": hasattr(io_struct, "PauseGenerationReqInput"),
        "Scheduler.process_input_requests": hasattr(scheduler.Scheduler, "process_input_requests"),
        "TokenizerManager.pause_generation": hasattr(tokenizer_manager.TokenizerManager, "pause_generation"),
        "GenerateReqInput.extra_key": "extra_key" in _fields(io_struct.GenerateReqInput),
    }
    if missing := [name for name, there in needed.items() if not there]:
        software = ENGINES["sglang"].software
        what = f"SGLang {software.release} has no {', '.join(missing)}."
        raise InvalidState(what, f"install SGLang {software.oldest_tested} or newer.")


def _fields(kind: Any) -> set[str]:
    return set(getattr(kind, "__struct_fields__", ())) or set(getattr(kind, "__dataclass_fields__", ()))
