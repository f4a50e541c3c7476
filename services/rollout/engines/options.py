"""Checks of options and models that are the same for every engine."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from millrace.engines import ENGINES, FIELD, reserved_option, unbuilt_option
from millrace.errors import InvalidJob, Mistake, refused
from millrace.sequence_cost import recurrence_by_layer, text_entries
from millrace.spec import JobSpec
from millrace.spec.pool import PoolTask
from millrace.validation.names import closest
from millrace.weights.folder_tensors import INDEX, SINGLE, other_values, stored_shapes
from services.rollout.engine import PoolModel

Checked = TypeVar("Checked")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
ROWS = 4096
"""Rows that are compared at a time."""
READ_BY_ENGINES = (".json", ".model", ".txt", ".tiktoken", ".py")
"""Endings of a model folder's files that an engine reads beside the weights: config, tokenizer, code."""


def check_images(spec: JobSpec, engine: str) -> None:
    """Raises InvalidJob if prompts may have images, and the replica's engine does not take them."""
    if spec.data.images is not None and not ENGINES[engine].takes_images:
        able = " or ".join(name for name, descriptor in ENGINES.items() if descriptor.takes_images)
        reason = f"the engine of this replica is {engine}, which takes no images here"
        raise refused("data.images", "given", reason, f"start replicas with {able}, or leave data.images out.")


def engine_needs(spec: JobSpec, engine: str) -> dict[str, Any]:
    """All that a running `engine` depends on, by the field of the job: it serves every job for which this is the same.
    The files of the model folder count by content, wherever the folder is. Its weights do not count, since publications
    bring them, unless the job has images and does not train the tower: then that is read from the folder."""
    model, rollout, images = spec.model, spec.rollout, spec.data.images
    needs: dict[str, Any] = {
        "model.trust_remote_code": model.trust_remote_code,
        "model.lora": model.publishes_adapter,
        "rollout.dtype": rollout.dtype,
        "data.max_prompt_tokens + rollout.max_response_tokens": spec.data.max_prompt_tokens
        + rollout.max_response_tokens,
        "data.images": images is not None,
        "trainer.train_tower": spec.trainer.train_tower,
        "algorithm.router_replay": spec.algorithm.router_replay,
    }
    needs |= {f"model.path ({name})": digest for name, digest in files_by_content(model.path).items()}
    needs |= {rollout.field_of(engine, name): value for name, value in rollout.options_of(engine).items()}
    if images is not None:
        needs["data.images.max_per_prompt"] = images.max_per_prompt
        needs |= {} if spec.trainer.train_tower else {"model.path (weights)": weight_files(model.path)}
    if model.lora is not None and model.publishes_adapter:
        # The rest of model.lora changes the values that are published, and nothing in the engine.
        needs |= {
            "model.lora.rank": model.lora.rank,
            "model.lora.target_modules": model.lora.target_modules,
            "model.lora.exclude_modules": model.lora.exclude_modules,
            "model.lora.adapter_path": _adapter_files(model.lora.adapter_path),
        }
    return needs


def _adapter_files(folder: str | None) -> object:
    """Equal for the same files of a PEFT folder, whose tensors say which layers have an adapter."""
    return None if folder is None else (files_by_content(folder), weight_files(folder))


def differing_needs(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The fields in which two results of `engine_needs` differ, sorted; without those below a field that differs."""
    absent = object()
    found = {name for name in one.keys() | other.keys() if one.get(name, absent) != other.get(name, absent)}
    return sorted(name for name in found if not any(name.startswith(f"{above}.") for above in found))


def files_by_content(folder: str) -> dict[str, str]:
    """SHA-256 of each file directly in a model folder that an engine reads beside the weights; empty if there is no
    such folder."""
    names = (path for path in sorted(Path(folder).glob("*")) if path.suffix in READ_BY_ENGINES and path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in names if not path.name.endswith(INDEX)}


def weight_files(folder: str) -> tuple[Any, ...]:
    """Path, size in bytes and time of the last change in ns of each safetensors file of a folder: the content is too
    large to compare."""
    paths = sorted(Path(folder).resolve().glob("*.safetensors"))
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


def check_names(spec: JobSpec, engine: str, known: Set[str], options: str) -> None:
    """Raises InvalidJob for an option of `engine` that the replica sets itself or cannot run with, or that is none of
    `known`. `options` is the engine's class of options, for the fix. Errors name the path of the option in the job
    spec."""

    def check(given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            check_name(engine, name, known, options)
            if mistake := unbuilt_option(ENGINES[engine], name, value):
                raise InvalidJob.of([mistake])

    with_whole_paths(spec, engine, check)


def with_whole_paths(spec: JobSpec, engine: str, check: Callable[[Mapping[str, Any]], Checked]) -> Checked:
    """What `check` returns for the options of `engine`. Its errors name an option below rollout.engine_options; here
    they get the path where the option stands in the job spec, which may be under the engine's name."""
    try:
        return check(spec.rollout.options_of(engine))
    except InvalidJob as error:
        paths = [spec.rollout.field_of(engine, each.field.removeprefix(f"{FIELD}.")) for each in error.mistakes]
        raise InvalidJob.of(
            [replace(each, field=path) for each, path in zip(error.mistakes, paths, strict=True)]
        ) from error


def check_name(engine: str, name: str, known: Set[str], options: str) -> None:
    """Raises InvalidJob for an option of rollout.engine_options that the replica sets itself, or that is none of
    `known`. `options` is the engine's class of options, for the fix."""
    if mistake := mistake_in(engine, name, ENGINES[engine].reserved_options, known, options):
        raise InvalidJob.of([mistake])


def mistake_in(
    engine: str, name: str, reserved: Mapping[str, str], known: Set[str], options: str, field: str = FIELD
) -> Mistake | None:
    """What is wrong with the name of an option that `field` has; None if nothing is. `reserved`: the options that
    the replica sets itself, each with the field of the job that has the same effect, or empty. The rest is as in
    `check_name`."""
    if name in reserved:
        return reserved_option(name, reserved[name], field)
    if name in known:
        return None
    title, near = ENGINES[engine].software.title, closest(name, known)
    fix = f"did you mean `{near}`?" if near is not None else f"see the fields of {title}'s {options}."
    return Mistake(f"{field}.{name}", f"{title} has no such option", fix)


def has_latents(model: str) -> bool:
    """Whether a model folder's attention is on latents (DeepSeek-V2 and later models)."""
    return bool(read_config(model).get("kv_lora_rank"))


def is_recurrent(model: str) -> bool:
    """Whether a model folder, or the text part of one, has layers of linear attention (Qwen3-Next, Qwen3.5)."""
    return any(recurrence_by_layer(read_text_config(model)))


def refuse_recurrent(model: str, engine: str, shown: Collection[str] = ()) -> None:
    """Raises InvalidJob for a model with layers of linear attention: their states are functions of the weights, and
    were not shown to be those of the trainer in `engine`, before and after a publication. `shown`: model types of which
    they were."""
    if is_recurrent(model) and read_config(model).get("model_type") not in shown:
        reason = f"its layers of linear attention were not shown to be the trainer's with {engine}"
        raise refused("model.path", model, reason, "choose a model with full attention.")


def read_config(model: str) -> dict[str, Any]:
    """The config of a model folder; empty if it has none."""
    path = Path(model) / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return config


def read_text_config(model: str) -> dict[str, Any]:
    """The same, with the entries of its text part in their place."""
    return text_entries(read_config(model))


def check_tied_head(model: PoolModel) -> None:
    """Raises InvalidJob if the config ties the output layer to the embedding and the folder stores another one:
    vLLM computes with the embedding then, transformers with the stored layer."""
    from transformers import AutoConfig

    folder = Path(model.pool.path)
    shapes = {} if model.task is PoolTask.REWARDS else stored_shapes(folder)
    heads = [name for name in shapes if name.split(".")[-2:] == ["lm_head", "weight"]]
    embeddings = [name for name in shapes if name.endswith(EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1:
        return
    config = AutoConfig.from_pretrained(folder, trust_remote_code=model.pool.trust_remote_code)
    if not config.tie_word_embeddings:
        return
    (head,), (embedding,) = heads, embeddings
    if shapes[head] != shapes[embedding] or not _equal(folder, head, embedding, shapes[head][0]):
        raise other_values(f"{model.field}.path: {folder}", head, embedding)


def _equal(folder: Path, one: str, other: str, rows: int) -> bool:
    import torch
    from safetensors import safe_open

    index = folder / INDEX
    file_of: dict[str, Any] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    paths = [folder / file_of.get(name, SINGLE) for name in (one, other)]
    with safe_open(paths[0], framework="pt") as first, safe_open(paths[1], framework="pt") as second:
        a, b = first.get_slice(one), second.get_slice(other)
        return all(torch.equal(a[at : at + ROWS], b[at : at + ROWS]) for at in range(0, rows, ROWS))
