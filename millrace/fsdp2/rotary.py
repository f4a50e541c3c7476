"""Rotary positions whose frequencies depend on how long a text is. Torch-free.

transformers computes them from the largest position of a forward pass, which packs texts of many lengths. Each engine
has another rule. Up to a limit all of them use the same frequencies for every text.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.engines import ENGINES
from millrace.errors import Mistake, wrong_value
from millrace.spec import JobSpec

ENTRIES = ("rope_parameters", "rope_scaling")
"""Entries of a model's config with the settings."""
ORIGINAL = "original_max_position_embeddings"
CONFIG_ENTRIES = (*ENTRIES, ORIGINAL, "max_position_embeddings", "model_type")
"""Entries that the rules read."""


def mistakes_of(spec: JobSpec, config: Mapping[str, Any], field: str, path: str | Path) -> Iterator[Mistake]:
    """What is wrong with the rotary positions of a model for this job. `field` names its folder `path`; `config` has
    the entries of its text part."""
    for settings in _settings(config):
        kind = settings.get("rope_type") or settings.get("type")
        if kind == "longrope":
            yield from _too_long(spec, kind, _original(config, settings))
        elif kind == "dynamic" and _has_alpha(config, settings):
            yield from _too_long(spec, kind, config.get("max_position_embeddings"))
        elif isinstance(kind, str) and "dynamic" in kind:
            reason = f"transformers and the engines compute its rotary positions ({kind}) by different rules"
            yield wrong_value(field, str(path), reason, "give its config.json yarn or linear scaling.")


def longest_text(spec: JobSpec) -> tuple[int, str]:
    """The most tokens that an engine of the job plans for, and the field that says so: vLLM chooses frequencies by
    it."""
    longest, field = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens, "rollout.max_response_tokens"
    for name, engine in ENGINES.items():
        asked = spec.rollout.options_of(name).get(engine.context_option)
        if isinstance(asked, int) and asked > longest:
            longest, field = asked, spec.rollout.field_of(name, engine.context_option)
    return longest, field


def _too_long(spec: JobSpec, kind: str, limit: Any) -> Iterator[Mistake]:
    longest, field = longest_text(spec)
    if isinstance(limit, int) and longest <= limit:
        return
    of_response = field == "rollout.max_response_tokens"
    value = spec.rollout.max_response_tokens if of_response else longest
    sizes = f"with data.max_prompt_tokens: {spec.data.max_prompt_tokens} a text may have {longest} tokens, and "
    reason = (
        f"{sizes if of_response else ''}beyond {limit} tokens engine and trainer choose the frequencies of the model's "
        f"rotary positions ({kind}) by different rules"
    )
    fix = f"lower the two to {limit} together" if of_response else f"lower it to {limit}"
    yield wrong_value(field, value, reason, f"{fix}, or give the model's config.json yarn or linear scaling.")


def _settings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings of rotary positions, once each; a config may have one for each kind of layer."""
    seen = list[Mapping[str, Any]]()
    for found in (config.get(entry) for entry in ENTRIES):
        if not isinstance(found, Mapping):
            continue
        for settings in (found, *(each for each in found.values() if isinstance(each, Mapping))):
            if settings not in seen:
                seen.append(settings)
                yield settings


def _original(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    """The length up to which the short factors count. Programs read it in different places: the least counts."""
    given = [settings.get(ORIGINAL), config.get(ORIGINAL)]
    known = [length for length in given if isinstance(length, int)]
    limit = min(known, default=config.get("max_position_embeddings"))
    return limit if isinstance(limit, int) else None


def _has_alpha(config: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the frequencies are scaled once by `alpha`, as only Hunyuan's models do."""
    return bool(settings.get("alpha")) and str(config.get("model_type")).startswith("hunyuan")
