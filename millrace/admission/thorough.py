"""Everything that `millrace validate` looks at and a submission does not: every row, prompts as tokens, the reward
function, the model as the backend builds it. Takes seconds to minutes, and runs the user's reward function."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from millrace.admission.pools import pool_tokenizer
from millrace.admission.submission import left_checkpoints
from millrace.admission.trials import SHOWN, RewardTrial, ask_judges, checks_models, model_mistakes
from millrace.data import PromptRow, PromptSource, open_section
from millrace.data.chat import render
from millrace.data.model_folder import vocabulary
from millrace.data.pictures import pictures_of
from millrace.data.row import json_texts
from millrace.errors import BadRow, InvalidJob, Mistake, wrong_value
from millrace.rewards import BUILT_IN
from millrace.spec.job import JobSpec

SAMPLE = 2000
"""Rows, at equal distances, whose prompts become tokens and whose ground truths a built-in reward reads."""
COUNTED = 65_536
"""Tokens up to which a prompt longer than `data.max_prompt_tokens` is counted. Tokens of a huge one take minutes."""
GENERATED = 100
"""Rows of a procedural source that are made."""
FUNCTION_ROWS = 4
"""Rows for which a user's function is called: the first of each data_source."""
RESUME = "resume that job with `millrace resume JOB`"
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Passes things on and shows how far it is: called with them, with what they are, and with their number."""


@dataclass
class Section:
    """What the rows of `data` or of `evaluation` showed."""

    name: str
    source: PromptSource
    procedural: bool
    rows: int = 0
    unusable: int = 0
    sample: list[PromptRow] = field(default_factory=list)
    first_of_source: dict[str, PromptRow] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    @property
    def field(self) -> str:
        """The field that names the rows."""
        return f"{self.name}.procedural" if self.procedural else f"{self.name}.files"

    def add(self, index: int, reason: str, fix: str) -> None:
        """Notes that a row cannot be used."""
        self.unusable += 1
        if self.unusable <= SHOWN:
            self.mistakes.append(Mistake(self.field, f"row {index}: {reason.removesuffix('.')}", fix))


def look(spec: JobSpec, progress: Progress, *, judges: bool = False) -> Iterator[str]:
    """What was found, for people, in the order of the job spec, each line as soon as it is known. With `judges` each
    judge is asked once. Raises InvalidJob with every mistake at the end."""
    used, mistakes, notes = list(left_checkpoints(spec.output, [RESUME])), list[Mistake](), list[str]()
    sections = []
    for opened in _sections(spec):
        sections.append(section := _read(spec, opened, progress))
        mistakes += section.mistakes
        if section.unusable > SHOWN:
            reason = f"{section.unusable - SHOWN} more rows cannot be used"
            mistakes.append(Mistake(section.field, reason, "correct them too, or leave them out."))
        notes += [f"{section.name}: {line}" for line in section.source.description]
        usable = section.rows - section.unusable
        notes.append(f"{section.name}: {usable} of {section.rows} rows can be used")
        yield from _taken(notes)
    if not mistakes:
        yield "prompts: loading the tokenizer and making tokens of them takes some seconds"
        mistakes += _prompts(spec, sections, progress, notes)
        yield from _taken(notes)
        for section in sections:
            mistakes += _rewards(spec, section, notes)
            yield from _taken(notes)
        if judges and spec.reward.judge_terms:
            mistakes += ask_judges(spec, sections[0].name, sections[0].sample[0], notes)
            yield from _taken(notes)
        mistakes += _pools(spec, notes)
        yield from _taken(notes)
        if checks_models(spec):
            yield f"model: building it as {spec.trainer.backend} does, without weights, takes some seconds"
            mistakes += model_mistakes(spec)
    if mistakes := [*used, *mistakes]:
        raise InvalidJob.of(list(dict.fromkeys(mistakes)), "the job cannot run:")


def _pools(spec: JobSpec, notes: list[str]) -> list[Mistake]:
    """Loads the tokenizers of the pools' models: a teacher has the policy's tokens, a judge a chat template."""
    mistakes: list[Mistake] = []
    for number, pool in enumerate(spec.pools):
        for task in spec.pool_tasks(pool.name):
            try:
                pool_tokenizer(spec.model, pool, task, f"pools.{number}.path")
                notes.append(f"pool {pool.name}: its tokenizer serves for {task}")
            except ImportError:
                notes.append(f"pool {pool.name}: not looked at, because transformers is not installed here")
            except InvalidJob as error:
                mistakes += error.mistakes
    return mistakes


def _taken(notes: list[str]) -> list[str]:
    """The notes so far, which the list does not have any more."""
    taken, notes[:] = notes[:], []
    return taken


def _sections(spec: JobSpec) -> Iterator[Section]:
    names: tuple[Literal["data", "evaluation"], ...] = ("data", "evaluation")
    for name in names:
        if (source := open_section(spec, name)) is not None:
            yield Section(name, source, getattr(spec, name).procedural is not None)


def _read(spec: JobSpec, section: Section, progress: Progress) -> Section:
    """Reads every row, and keeps a sample."""
    total = min(len(section.source), GENERATED) if section.procedural else len(section.source)
    distance = max(1, total // SAMPLE)
    rows = progress(section.source.scan(), f"rows of {section.name}", total)
    for index, row in zip(range(total), rows, strict=False):
        section.rows += 1
        try:
            if isinstance(row, BadRow):
                raise row
            json_texts(row)
            spec.reward.terms(procedural=section.procedural, style=row.reward_style, data_source=row.data_source)
        except (BadRow, InvalidJob) as error:
            section.add(index, error.what, error.fix)
            continue
        if index % distance == 0:
            section.sample.append(row)
        if len(section.first_of_source) < FUNCTION_ROWS:
            section.first_of_source.setdefault(row.data_source, row)
    if not section.sample and not section.mistakes:
        section.mistakes.append(Mistake(section.field, "has no rows", "add some."))
    return section


def _prompts(spec: JobSpec, sections: list[Section], progress: Progress, notes: list[str]) -> list[Mistake]:
    """Makes tokens of the sampled prompts: which the chat template refuses, and how many are too long."""
    try:
        tokenizer, pictures = _tokenizer(spec), pictures_of(spec.model.path, spec.data.images)
    except InvalidJob as error:
        return list(error.mistakes)
    except ImportError:
        notes.append("prompts: not looked at, because transformers is not installed here")
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "save the tokenizer into the model folder (tokenizer.save_pretrained)."
        reason = f"its tokenizer cannot be loaded: {str(error)[:300]}"
        return [wrong_value("model.path", spec.model.path, reason, fix)]
    mistakes: list[Mistake] = []
    most = _counted(spec)
    for section in sections:
        lengths, largest, refused = [], -1, Section(section.name, section.source, section.procedural)
        for row in progress(section.sample, f"prompts of {section.name}", len(section.sample)):
            options = spec.data.chat_template_options
            try:
                rendered = render(row, tokenizer, max_tokens=most, chat_template_options=options, pictures=pictures)
                lengths.append(len(rendered.token_ids) if rendered.dropped is None else most + 1)
                largest = max((largest, *rendered.token_ids))
            except BadRow as error:
                refused.add(row.index, error.what, error.fix)
        mistakes += refused.mistakes
        if lengths:
            mistakes += _lengths(spec, section, lengths, notes)
            mistakes += _beyond_embedding(spec, section, largest, tokenizer, notes)
    return mistakes


def _beyond_embedding(spec: JobSpec, section: Section, largest: int, tokenizer: Any, notes: list[str]) -> list[Mistake]:
    """Compares the largest token id of the prompts, and the tokenizer's tokens, with the rows of the embedding: an
    engine dies of an id beyond them."""
    rows = vocabulary(Path(spec.model.path))
    if rows is None or len(tokenizer) <= rows:
        return []
    fix = f"resize the model (model.resize_token_embeddings({len(tokenizer)})) and save it, or take the tokens out."
    if largest >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        reason = f"prompts of {section.name} have the token {token!r} with id {largest}; its embedding has {rows} rows"
        return [wrong_value("model.path", spec.model.path, reason, fix)]
    notes.append(
        f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows: an engine dies of those beyond "
        f"it. No prompt of {section.name} that was looked at has one"
    )
    return []


def _tokenizer(spec: JobSpec) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of prompts that are longer than the model's context
    return AutoTokenizer.from_pretrained(spec.model.path, trust_remote_code=spec.model.trust_remote_code)


def _counted(spec: JobSpec) -> int:
    """Tokens up to which those of a prompt are counted."""
    return max(spec.data.max_prompt_tokens, COUNTED)


def _lengths(spec: JobSpec, section: Section, lengths: list[int], notes: list[str]) -> list[Mistake]:
    most, drops = spec.data.max_prompt_tokens, spec.data.overlong_prompts == "drop"
    over = sum(length > most for length in lengths)
    counted = _counted(spec)
    shortest, longest = (
        str(length) if length <= counted else f"more than {counted}" for length in (min(lengths), max(lengths))
    )
    if over == len(lengths) and drops:
        reason = f"every prompt of {section.name} would be dropped: the shortest has {shortest} tokens"
        fix = f"raise it, to {longest} for all, or set data.overlong_prompts."
        return [wrong_value("data.max_prompt_tokens", most, reason, fix)]
    then = "dropped" if drops else "cut"
    notes.append(
        f"prompts of {section.name}: {len(lengths)} looked at, the longest has {longest} tokens; {over} "
        f"({over / len(lengths):.1%}) are longer than data.max_prompt_tokens ({most}) and would be {then}"
    )
    return []


def _rewards(spec: JobSpec, section: Section, notes: list[str]) -> list[Mistake]:
    """Scores rows with their own ground truths: a user's function few of them, a built-in reward the whole sample."""
    terms = spec.reward.terms(procedural=section.procedural)
    if not terms:
        return []
    name = ", ".join(term.function for term in terms)
    built_in = all(term.function in BUILT_IN for term in terms)
    rows = section.sample if built_in else list(section.first_of_source.values())
    trial = RewardTrial(spec, terms, section.name, rows)
    if mistakes := list(trial.mistakes()):
        return mistakes
    given = "" if trial.score is None else f"; the first one's ground truth as an answer gives {trial.score:g}"
    notes.append(f"reward of {section.name}: {name} scored {trial.scored} of {len(rows)} rows{given}")
    return []
