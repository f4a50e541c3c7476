"""Which column of a file is what: as `data.columns` says, else as verl, TRL and OpenAI name their columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from millrace.errors import InvalidJob, Mistake, wrong_value
from millrace.spec.model import ColumnRole, PromptFormat

PROMPTS = ("prompt", "messages")
VERL_TRUTH = "reward_model.ground_truth"
TRUTHS = ("ground_truth", "solution", "answer", "completion")
"""Columns that are taken for the ground truth."""
OWN_NAMES: tuple[ColumnRole, ...] = ("data_source", "extra_info", "ability")
"""Roles whose column has the same name."""


@dataclass(frozen=True)
class Reading:
    """What a job says about the rows of its files."""

    columns: Mapping[ColumnRole, str] = field(default_factory=dict)
    """`data.columns`."""
    prompt_format: PromptFormat = "auto"
    most_images: int | None = None
    """Most images of a row; None: rows have none, and a column `images` is a column like others."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of a prompt row are in the rows of one file. Names may be paths in nested objects, `a.b`."""

    prompt: str
    ground_truth: str | None
    """None: the last answer of the conversation, if it ends with one."""
    default_source: str
    """The data_source of rows without a column for it."""
    data_source: str | None = None
    extra_info: str | None = None
    """None: an object of the columns in `others`."""
    ability: str | None = None
    reward_style: str | None = None
    images: str | None = None
    others: tuple[str, ...] = ()
    """Columns that have no other use."""

    @property
    def whole_conversation(self) -> bool:
        """Whether the last answer of the assistant belongs to the example and not to its prompt. A column called
        `prompt` may end with the beginning of an answer."""
        return self.prompt != "prompt"

    @property
    def read_columns(self) -> set[str]:
        """Names of the columns that are read, with and without what follows a dot."""
        used = [self.prompt, self.ground_truth, self.data_source, self.extra_info, self.ability, self.reward_style]
        used.append(self.images)
        named = {name for name in used if name is not None} | set(() if self.extra_info else self.others)
        return named | {name.partition(".")[0] for name in named}

    def without(self, unreadable: Sequence[str]) -> "Layout":
        """The layout without columns that JSON cannot hold."""
        return replace(self, others=tuple(name for name in self.others if name not in unreadable))

    def __str__(self) -> str:
        """What is taken for what, for people."""
        prompt, truth = f"prompt from {self.prompt}", "no ground truth"
        if self.whole_conversation:
            prompt += " (without a last answer of the assistant)"
            truth = "ground truth from that answer, if there is one"
        if self.ground_truth is not None:
            truth = f"ground truth from {self.ground_truth}"
        source = f"data_source {self.default_source!r} (the file's name)"
        if self.data_source is not None:
            source = f"data_source from {self.data_source}"
        info = "no extra_info"
        if self.extra_info is not None:
            info = f"extra_info from {self.extra_info}"
        elif self.others:
            info = f"extra_info from the other columns: {', '.join(self.others)}"
        info += f", images from {self.images}" if self.images else ""
        unseen = "; the chat template does not get the column tools" if "tools" in self.others else ""
        return f"{prompt}, {truth}, {source}, {info}{unseen}"


def layout_of(
    found: Sequence[str], columns: Mapping[ColumnRole, str], path: str, files_field: str, *, images: bool = False
) -> Layout:
    """The layout of a file with the columns `found`. `columns` has the names that the job gives; `images`: rows may
    have some. Raises InvalidJob with every column that is missing, and with those of which several could be the ground
    truth."""
    section = files_field.rpartition(".")[0]
    named = {role: name for role, name in columns.items() if not _has(found, name)}
    mistakes = [
        wrong_value(
            f"{section}.columns.{role}", name, f"{path} has no such column; it has {', '.join(found)}", "name one."
        )
        for role, name in named.items()
    ]
    used: dict[ColumnRole, str] = {role: name for role, name in columns.items() if role not in named}
    own_names: tuple[ColumnRole, ...] = (*OWN_NAMES, "images") if images else OWN_NAMES
    used |= {role: role for role in own_names if role not in columns and role in found}
    if "ground_truth" not in columns and "reward_model" in found:
        used["ground_truth"] = VERL_TRUTH
        used.setdefault("reward_style", "reward_model.style")
    prompts = [name for name in PROMPTS if name in found]
    if "prompt" not in columns and prompts:
        used["prompt"] = prompts[0]
    elif "prompt" not in columns:
        mistakes.append(_no_prompt(found, path, files_field, section))
    if "ground_truth" not in columns and "ground_truth" not in used:
        truths = [name for name in TRUTHS if name in found and name != used.get("prompt")]
        if {"solution", "answer"} <= set(truths) and "ground_truth" not in truths:
            reason = "has the columns solution and answer, and each could be the ground truth"
            fix = f"say which one: {section}.columns: {{ground_truth: answer}}."
            mistakes.append(wrong_value(files_field, path, reason, fix))
        elif truths:
            used["ground_truth"] = truths[0]
    if mistakes:
        raise InvalidJob.of(mistakes)
    tops = {name.partition(".")[0] for name in used.values()} | set(used.values())
    others = tuple(name for name in found if name not in tops and not name.startswith("__"))
    return Layout(
        prompt=used["prompt"],
        ground_truth=used.get("ground_truth"),
        default_source=_source_name(path),
        data_source=used.get("data_source"),
        extra_info=used.get("extra_info"),
        ability=used.get("ability"),
        reward_style=used.get("reward_style"),
        images=used.get("images"),
        others=others,
    )


def _no_prompt(found: Sequence[str], path: str, files_field: str, section: str) -> Mistake:
    likely = [name for name in ("question", "problem", "instruction", "query", "input", "text") if name in found]
    mapping = f"prompt: {likely[0] if likely else 'COLUMN'}"
    if not any(name in found for name in (*TRUTHS, "reward_model")):
        mapping += ", ground_truth: COLUMN"
    reason = f"has no column {' or '.join(PROMPTS)}; it has {', '.join(found) or 'none'}"
    return wrong_value(files_field, path, reason, f"say which column is what: {section}.columns: {{{mapping}}}.")


def _has(found: Sequence[str], name: str) -> bool:
    return name in found or name.partition(".")[0] in found


def _source_name(path: str) -> str:
    """The name of a file without its endings and the number of its part: `train-00000-of-00002.parquet` is `train`."""
    stem = Path(path).name.split(".")[0]
    head, dash, count = stem.rpartition("-of-")
    name, second, part = head.rpartition("-")
    return name if dash and second and count.isdigit() and part.isdigit() else stem or Path(path).name
