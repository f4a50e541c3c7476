"""The engines, and which of their options are not a job's to set. Imports none of them: `rollout.engine_options` are
checked where a job is submitted, as far as that goes without the engine, and by each replica for the rest."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.errors import InvalidJob, Mistake

ENGINES = ("vllm", "sglang", "transformers")
FIELD = "rollout.engine_options"

OURS: dict[str, dict[str, str]] = {
    "vllm": {
        "model": "model.path",
        "tokenizer": "model.path",
        "trust_remote_code": "model.trust_remote_code",
        "dtype": "rollout.dtype",
        "load_format": "",
        "logprobs_mode": "",
        "worker_extension_cls": "",
        "generation_config": "",
        "enable_log_requests": "",
        "data_parallel_size": "",
        "quantization": "",
        "enable_return_routed_experts": "algorithm.router_replay",
    },
    "sglang": {
        "model_path": "model.path",
        "tokenizer_path": "model.path",
        "trust_remote_code": "model.trust_remote_code",
        "dtype": "rollout.dtype",
        "load_format": "",
        "sampling_backend": "",
        "random_seed": "",
        "skip_tokenizer_init": "",
        "quantization": "",
        "kv_cache_dtype": "",
        "pp_size": "",
        "dp_size": "",
        "nnodes": "",
        "speculative_algorithm": "",
        "disaggregation_mode": "",
    },
}
"""By engine: options that a job cannot set, and the field that says it instead."""
THEIRS = frozenset({"enable_return_routed_experts", "kv_cache_dtype", "nnodes", "skip_tokenizer_init"})
"""Those that the other of the two engines takes: a job may set them for a fleet that has that one alone."""


def mistakes_of(engine_options: Mapping[str, Any]) -> Iterator[Mistake]:
    """Options that no replica, or none with the engine that they are for, would take."""
    for name, value in engine_options.items():
        if name in ENGINES:
            ours = OURS.get(name, {})
            yield from (reserved(f"{name}.{option}", ours[option]) for option in value if option in ours)
        elif isinstance(value, Mapping) and (engine := _engine_meant(name)):
            fix = f"did you mean `{engine}`? The engines are {', '.join(ENGINES)}."
            yield Mistake(f"{FIELD}.{name}", "there is no such engine", fix)
        elif name not in THEIRS and (tables := [table for table in OURS.values() if name in table]):
            yield reserved(name, tables[0][name])


def reserved(option: str, instead: str) -> Mistake:
    """The mistake of setting an option that a job cannot set. `instead` is the field of the job that has the same
    effect; empty where there is none."""
    fix = f"set {instead} instead." if instead else "remove it: the replica sets it."
    return Mistake(f"{FIELD}.{option}", "a job cannot set this option", fix)


def ours_to_set(option: str, instead: str) -> InvalidJob:
    """The error for a reserved option."""
    return InvalidJob.of([reserved(option, instead)])


def _engine_meant(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name.lower(), ENGINES, n=1)), None)
