"""What pydantic found wrong with a job spec, told to its writer as field, value, reason and fix."""

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from millrace.errors import InvalidJob, refused
from millrace.spec.job import JobSpec
from millrace.validation.foreign_names import counted, meant, places

Location = tuple[int | str, ...]
Options = TypeVar("Options", bound=BaseModel)

EXAMPLES = {
    "model": "{path: /data/models/Qwen3-0.6B}",
    "data": "{files: [/data/train.parquet]}",
    "files": "[/data/train.parquet]",
    "reward": "{function: math}",
    "parts": "[score, format]",
    "rollout": "{samples_per_prompt: 8, max_response_tokens: 1024}",
    "stop": '["</answer>"]',
    "engine_options": "{max_num_seqs: 256}",
    "algorithm": "{preset: grpo}",
    "advantage": "{name: grpo}",
    "policy_loss": "{name: ppo, options: {clip_high: 0.28}}",
    "critic": "{clip: 0.5}",
    "kl": "{name: k3}",
    "correction": "{name: tis_token}",
    "trainer": "{backend: fsdp2, token_budget: 16384}",
    "optimizer": "{lr: 1.0e-6}",
    "betas": "[0.9, 0.95]",
    "recompute": "{granularity: full}",
    "experts": "{dispatcher: auto}",
    "publication": "{path: auto}",
    "schedule": "{steps: 100, prompts_per_step: 64}",
    "evaluation": "{files: [/data/held_out.parquet]}",
    "deadlines": "{step_s: 3600}",
    "tracking": "{trackers: [tensorboard]}",
    "trackers": "[tensorboard]",
}
"""What may be written for a part of the tree, or for a field that is a mapping or a list."""


def options(kind: type[Options], given: Mapping[str, Any], above: str) -> Options:
    """`given`, the mapping in the field `above` of a job spec, as the options that a backend takes. Raises InvalidJob
    that tells every mistake."""
    mistakes = numbers_that_are_none(given, kind, f"{above}.")
    try:
        checked = kind.model_validate(dict(given))
    except ValidationError as error:
        mistakes += [line for e in error.errors() for line in told(e, kind, f"{above}.")]
    if mistakes:
        raise InvalidJob("\n".join(line.strip() for line in mistakes))
    return checked


def told(error: Any, root: type[BaseModel] = JobSpec, above: str = "") -> list[str]:
    """The lines about one of `ValidationError.errors()` of `root`, whose fields stand under `above`."""
    field = above + ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error" and (not error["loc"] or isinstance(error["ctx"]["error"].args[0], InvalidJob)):
        return [f"  {line}" for line in str(error["ctx"]["error"]).splitlines()]
    if error["type"] == "extra_forbidden":
        return [f"  {field}: there is no such field. Fix: {_nearest(root, error['loc'])}"]
    if error["type"] == "missing":
        return [f"  {field}: is missing. Fix: {_example(root, error['loc']) or 'add it.'}"]
    value = json.dumps(error["input"], default=str)
    reason, fix = _reason(error), _allowed(root, error)
    return [f"  {field}: {value[:200]} will not do: {reason}. Fix: {fix}"]


DEEPEST, MOST_VALUES = 50, 100_000
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


def unwritable(tree: Mapping[str, Any]) -> list[str]:
    """The lines about what no JSON, file name or store takes: parts that hold themselves, far too many of them, bytes,
    and text with a NUL or half a character."""
    lines: list[str] = []
    waiting: list[tuple[Location, Any]] = [((), tree)]
    for count in itertools.count(1):
        if not waiting:
            break
        location, value = waiting.pop()
        field = ascii(".".join(map(str, location)))[1:-1]
        if len(location) > DEEPEST:
            start = ".".join(field.split(".")[:3])
            return [f"  {start}: holds itself, or is more than {DEEPEST} deep. Fix: write plain options there."]
        if count > MOST_VALUES:
            return [f"  {field}: a job spec has at most {MOST_VALUES} values. Fix: put data into files."]
        if isinstance(value, bytes) or (isinstance(value, str) and _UNWRITABLE.search(value)):
            reason = "bytes, NULs and halves of a character cannot be written"
            lines.append(f"  {refused(field, value[:200], reason, 'give plain text.')}")
        elif isinstance(value, Mapping):
            waiting += [((*location, str(name)), inner) for name, inner in value.items()]
            waiting += [((*location, str(name)), name) for name in value if isinstance(name, str | bytes)]
        elif isinstance(value, list | tuple):
            waiting += [((*location, place), inner) for place, inner in enumerate(value)]
    return lines


def numbers_that_are_none(tree: Mapping[str, Any], part: type[BaseModel] = JobSpec, above: str = "") -> list[str]:
    """The lines about `true` and `false` where a number is wanted, which Python and so pydantic count as 1 and 0, and
    about options that are not finite: a spec is kept and sent as JSON, which has no such numbers."""
    lines: list[str] = []
    for name, value in tree.items():
        field = part.model_fields.get(str(name))
        inner = _inner(field)
        if inner is not None and isinstance(value, Mapping):
            lines += numbers_that_are_none(value, inner, f"{above}{name}.")
        elif field is not None and isinstance(value, bool):
            kinds = {field.annotation, *getattr(field.annotation, "__args__", ())}
            if kinds & {int, float} and bool not in kinds:
                wanted = _KINDS["int" if int in kinds else "float"]
                told_value = json.dumps(value)
                lines.append(f"  {above}{name}: {told_value} will not do: this is not {wanted}. Fix: give {wanted}.")
        elif field is not None and isinstance(value, Mapping) and not _finite(value):
            written = json.dumps(value, default=str, skipkeys=True)
            lines.append(
                f"  {above}{name}: {written} will not do: its numbers have to be finite. Fix: give finite ones."
            )
    return lines


def _finite(options: Mapping[Any, Any]) -> bool:
    try:
        json.dumps(options, allow_nan=False, default=str, skipkeys=True)
    except ValueError:
        return False
    return True


_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping",
}


def _reason(error: Any) -> str:
    kind = _kind(error)
    return f"this is not {_KINDS[kind]}" if error["type"].endswith("_type") and kind in _KINDS else error["msg"]


def _kind(error: Any) -> str:
    kind: str = error["type"].removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
    return kind


def _allowed(root: type[BaseModel], error: Any) -> str:
    """What would do instead, from pydantic's own bounds."""
    context = {k: v for k, v in error.get("ctx", {}).items() if k != "error"}
    if limits := [f"{words} {context[k]:g}" for k, words in _LIMITS.items() if k in context]:
        return f"give a number that is {' and '.join(limits)}."
    if "expected" in context:
        return f"give {context['expected']}."
    if "pattern" in context:
        return f"give text that matches {context['pattern']}."
    if "min_length" in context or "max_length" in context:
        return "make it longer." if error["type"].endswith("_short") else "make it shorter."
    if example := _example(root, error["loc"]):
        return example
    kind = _kind(error)
    return f"give {_KINDS[kind]}." if kind in _KINDS else "give another value, or leave it out."


def _example(root: type[BaseModel], location: Location) -> str:
    """What may be written for a field that is no plain value; empty for others, and where no example is known."""
    field, name = _field(root, location), str(location[-1])
    if field is None or name not in EXAMPLES:
        return ""
    kind = "a list" if EXAMPLES[name].startswith("[") else "a mapping"
    fix = f"give {kind}, for example `{name}: {EXAMPLES[name]}`"
    return f"{fix}." if field.is_required() else f"{fix}, or leave it out."


def _nearest(root: type[BaseModel], location: Location) -> str:
    """Names the field that was probably meant: in this part, by another trainer's name, or in another part."""
    part, written = _part(root, location[:-1]), str(location[-1])
    if part is None:
        return "remove it."
    names = list(part.model_fields)
    other_unit = f" It is {unit}." if (unit := counted(written)) else ""
    if known := meant(written, names):
        return f"did you mean `{known}`?{other_unit}"
    if others := [place for place in places(written) if place.partition(".")[0] in JobSpec.model_fields]:
        return f"here that is {' or '.join(f'`{place}`' for place in others)}.{other_unit}"
    if close := difflib.get_close_matches(written, names, n=1, cutoff=0.5):
        return f"did you mean `{close[0]}`?"
    if elsewhere := [path for path in _paths(root) if path.rpartition(".")[2] == written]:
        return f"did you mean `{elsewhere[0]}`?"
    return f"remove it; there are {', '.join(names)}."


def _paths(part: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every field of the tree with the parts above it, those of a part before those inside them."""
    yield from (above + name for name in part.model_fields)
    for name, field in part.model_fields.items():
        if inner := _inner(field):
            yield from _paths(inner, f"{above}{name}.")


def _part(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    part: type[BaseModel] | None = root
    for step in location:
        part = _inner(part.model_fields.get(str(step))) if part is not None else None
    return part


def _field(root: type[BaseModel], location: Location) -> FieldInfo | None:
    part = _part(root, location[:-1])
    return part.model_fields.get(str(location[-1])) if part is not None else None


def _inner(field: FieldInfo | None) -> type[BaseModel] | None:
    kinds = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
