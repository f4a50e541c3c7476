"""Checks that a Hugging Face model folder can be used, by its files, without loading it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.checkpoints.index import is_checkpoint
from millrace.data.quantization import block_scales
from millrace.errors import refused
from millrace.sequence_cost import text_entries

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SCALING = ("factor", "original_max_position_embeddings")
OTHER_HEADS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "ForPreTraining",
)
"""Endings of the names of architectures that give no distribution of the next token."""
GENERATION = "generation_config.json"
FIELD = "model.path"


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that was checked."""

    path: Path
    architecture: str
    """The first architecture in config.json, such as `Qwen3ForCausalLM`."""
    has_chat_template: bool


def check_model_folder(path: str | Path, *, messages: bool = True, weights: bool = True) -> ModelFolder:
    """Checks the folder. Raises InvalidJob if the folder, its config, tokenizer or weights are missing or broken, or
    the weights are quantized in a way that cannot be read; with `messages` (prompts are messages rather than plain
    text) also if there is no chat template. Without `weights` those are not looked for."""
    folder = _folder(path, FIELD)
    config = _json(folder / "config.json", folder)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        fix = 'add it, for example "architectures": ["Qwen3ForCausalLM"].'
        raise refused(FIELD, str(path), "config.json names no architecture", fix)
    if architectures[0].endswith(OTHER_HEADS):
        reason = f"{architectures[0]} does not generate text"
        raise refused(FIELD, str(path), reason, "give a language model, for example a Qwen3ForCausalLM.")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise refused(
            FIELD,
            str(path),
            f"has no tokenizer: none of {', '.join(TOKENIZER_FILES)}",
            "save the tokenizer into the same folder (tokenizer.save_pretrained).",
        )
    if weights:
        _check_weights(folder, FIELD)
    block_scales(config, folder, FIELD)
    generation_end_tokens(folder)
    templated = has_chat_template(folder)
    if messages and not templated:
        raise refused(
            FIELD,
            str(path),
            "the prompts are messages and the model has no chat template",
            "put a chat_template.jinja into the folder, or set data.prompt_format to text.",
        )
    return ModelFolder(folder, architectures[0], templated)


def check_weights_folder(path: str | Path, *, field: str, weights: bool = True) -> Path:
    """Checks a folder of which only config and weights are read, and returns its path. Raises InvalidJob that names
    `field`. Without `weights` those are not looked for."""
    folder = _folder(path, field)
    config = _json(folder / "config.json", folder, field)
    if weights:
        _check_weights(folder, field)
    block_scales(config, folder, field)
    return folder


def text_config(folder: Path, field: str = FIELD) -> dict[str, Any]:
    """The entries of config.json, with those of the text part in their place. Raises InvalidJob that names `field`."""
    return text_entries(_json(folder / "config.json", folder, field))


def generation_end_tokens(folder: Path, field: str = FIELD) -> frozenset[int]:
    """Tokens that end an answer by generation_config.json; none if there is no such file or it names none. Raises
    InvalidJob that names `field`."""
    file = folder / GENERATION
    named = _json(file, folder, field).get("eos_token_id") if file.is_file() else None
    tokens = named if isinstance(named, list) else [named] if named is not None else []
    if not all(type(token) is int and token >= 0 for token in tokens):
        reason = f"eos_token_id of {GENERATION} is {named!r}"
        raise refused(field, str(folder), reason, "give the id of a token, or a list of them.")
    return frozenset(tokens)


def vocabulary(folder: Path) -> int | None:
    """Number of tokens in the vocabulary by config.json; None if it does not say."""
    config = _json(folder / "config.json", folder)
    size = config.get("vocab_size") or text_entries(config).get("vocab_size")
    return int(size) if size else None


def context(folder: Path) -> int | None:
    """Longest text, in tokens, by config.json; None if it does not say.

    With scaled rotary positions the scaled length counts. Some configs give the scaled length as
    `max_position_embeddings`, others the length before scaling, so the longer of the two is taken.
    """
    config = text_config(folder)
    length = config.get("max_position_embeddings")
    if not isinstance(length, int):
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    factor, original = (scaling.get(key) for key in SCALING) if isinstance(scaling, dict) else (None, None)
    if not isinstance(factor, int | float):
        return length
    return max(length, int(factor * (original if isinstance(original, int) else length)))


def _folder(path: str | Path, field: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        found = "is a file" if folder.is_file() else f"there is no folder {folder.absolute()}"
        fix = "give the folder of a Hugging Face model, or the name of one on the hub, owner/name."
        raise refused(field, str(path), found, fix)
    try:
        odd = sorted(each.name for each in folder.iterdir() if each.exists() and not (each.is_file() or each.is_dir()))
    except OSError as error:
        reason = f"cannot be listed: {error.strerror}"
        raise refused(field, str(path), reason, "give the services the right to read it.") from error
    if odd:
        reason = f"{odd[0]} is neither a file nor a folder, and to read it may never end"
        raise refused(field, str(path), reason, "remove it, or write or download the file again.")
    return folder


def _check_weights(folder: Path, field: str) -> None:
    for index in WEIGHT_INDEXES:
        if (folder / index).is_file():
            named = _json(folder / index, folder, field).get("weight_map")
            shards = set(named.values()) if isinstance(named, dict) else set()
            if missing := sorted(str(s) for s in shards if not (folder / str(s)).is_file()):
                named_here = f"{index} names {len(shards)} files, and {len(missing)} of them are missing"
                reason = f"{named_here}: {', '.join(missing[:3])}"
                raise refused(field, str(folder), reason, "finish the download or the copy.")
    if not any(file.is_file() for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)):
        if is_checkpoint(folder):
            return
        reason = f"has no weights: no {' and no '.join(WEIGHT_PATTERNS)}"
        raise refused(field, str(folder), reason, "save the model into the same folder (model.save_pretrained).")


def has_chat_template(folder: Path) -> bool:
    """Whether the folder says how messages become a text."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(_json(config, folder).get("chat_template"))


def check_regular(file: Path) -> None:
    """Raises ValueError for what is there and no file: to read a pipe or a device may never end."""
    if file.exists() and not file.is_file():
        raise ValueError("it is not a regular file")


def _json(file: Path, folder: Path, field: str = FIELD) -> dict[str, Any]:
    try:
        check_regular(file)
        tree = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        fix = "give the folder of a Hugging Face model, with config, tokenizer and weights."
        raise refused(field, str(folder), f"has no {file.name}", fix) from error
    except (OSError, ValueError) as error:
        reason = f"{file.name} cannot be read: {error}"
        raise refused(field, str(folder), reason, "write or download the file again.") from error
    if not isinstance(tree, dict):
        raise refused(field, str(folder), f"{file.name} is not a JSON object", "write or download the file again.")
    return tree
