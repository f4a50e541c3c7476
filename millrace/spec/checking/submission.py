"""Whether a job can work on this machine: every mistake is found before it is taken in, and all are told at once.

Paths have to be whole. Every service opens them by itself, and each would take a relative one from its own working
folder; a client does not complete them either, as the services may run on other machines than it does.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from millrace import engines
from millrace.backends import fsdp2
from millrace.data import open_source
from millrace.data.model_folder import check_model_folder, check_weights_folder, context, vocabulary
from millrace.errors import InvalidJob, refused
from millrace.megatron.rules import check_submission as check_megatron
from millrace.rewards import check as check_reward
from millrace.rewards import choose
from millrace.rewards.locate import Target
from millrace.spec import JobSpec, parse
from millrace.spec.checking import choices
from millrace.telemetry.trackers import check as check_trackers

OF_POSITIONS = {"hf_overrides", "rope_scaling", "rope_parameters", "json_model_override_args"}
"""Of rollout.engine_options: what changes how far a model's positions go."""


def check(tree: Any) -> JobSpec:
    """The spec in `tree`, which can be carried out here. Raises InvalidJob with every mistake. Reads files."""
    spec = parse(tree)
    mistakes = list(_too_long(spec)) or [*_relative(spec), *_data(spec), *_algorithm(spec), *_rest(spec)]
    if mistakes:
        raise InvalidJob("\n".join(["the job cannot work:", *(f"  {mistake}" for mistake in mistakes)]))
    return spec


def _attempt(look: Callable[..., Any], *arguments: Any, **named: Any) -> Iterator[str]:
    try:
        look(*arguments, **named)
    except InvalidJob as error:
        yield str(error)


def _relative(spec: JobSpec) -> Iterator[str]:
    for field, path, function in _paths(spec):
        if not Path(path).is_absolute():
            reason = "each service would take it from its own working folder"
            whole = os.path.abspath(os.path.expanduser(path))
            likely = field == "output" or os.path.exists(whole)
            fix = f"write the whole path, for example {whole}{function}." if likely else "write the whole path."
            yield str(refused(field, path + function, reason, fix))


def _too_long(spec: JobSpec) -> Iterator[str]:
    """Paths that no look at the files would survive."""
    for field, path, function in _paths(spec):
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                yield str(refused(field, (path + function)[:200], "no file has such a long name", "give another path."))


def _paths(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Each field that names a file or folder: that path, and `:function` where it goes on."""
    yield "output", spec.output, ""
    yield "model.path", spec.model.path, ""
    critic = spec.algorithm.critic
    if critic is not None and critic.path is not None:
        yield "algorithm.critic.path", critic.path, ""
    for field, data in (("data.files", spec.data), ("evaluation.files", spec.evaluation)):
        yield from ((field, file, "") for file in (data.files if data is not None else ()))
    place, colon, function = spec.reward.function.rpartition(":")
    if Target(place, function).is_file:
        yield "reward.function", place, colon + function
    for name in ("advantage", "policy_loss", "correction"):
        choice = getattr(spec.algorithm, name)
        if choice is not None and ":" in choice.name:
            place, colon, function = choice.name.rpartition(":")
            yield f"algorithm.{name}.name", place, colon + function


def _data(spec: JobSpec) -> Iterator[str]:
    """Data, the rewards that its rows ask for, and the model with the template that its prompts need."""
    mistakes: list[str] = []
    data, evaluation = spec.data, spec.evaluation
    named = [("data", data.files, data.procedural, data.procedural_options)]
    if evaluation is not None:
        named.append(("evaluation", evaluation.files, evaluation.procedural, evaluation.procedural_options))
    messages, rewards = False, set()
    for field, files, procedural, options in named:
        try:
            first = open_source(files, procedural, options, field=field)[0]
            messages = messages or isinstance(first.prompt, list)
            rewards.add(choose(spec.reward.function, procedural=procedural is not None, style=first.reward_style))
        except InvalidJob as error:
            mistakes.append(str(error))
    yield from dict.fromkeys(mistakes)
    unusable = list(_attempt(check_model_folder, spec.model.path, messages=messages))
    yield from unusable or _attempt(_context, spec)
    for name in sorted(rewards):
        yield from _attempt(check_reward, name, spec.reward.options)


def _context(spec: JobSpec) -> None:
    """The model knows its longest text, unless an engine is told otherwise."""
    told = [spec.rollout.options_of(engine) for engine in engines.ENGINES]
    if any(not OF_POSITIONS.isdisjoint(options) for options in told):
        return
    prompt, response = spec.data.max_prompt_tokens, spec.rollout.max_response_tokens
    if (most := context(Path(spec.model.path))) is not None and prompt + response > most:
        reason = (
            f"with data.max_prompt_tokens of {prompt} a text may have {prompt + response} tokens, and the model knows "
            f"positions up to {most} (max_position_embeddings in its config.json)"
        )
        fix = f"lower the two to {most} together, or give the model's config a rope_scaling."
        raise refused("rollout.max_response_tokens", response, reason, fix)


def _algorithm(spec: JobSpec) -> Iterator[str]:
    yield from map(str, choices.mistakes_of(spec))
    critic = spec.algorithm.critic
    if critic is not None and critic.path is not None:
        yield from _attempt(_critic_folder, spec.model.path, critic.path)


def _critic_folder(model: str, critic: str) -> None:
    """Values are of the policy's tokens, so both have to mean the same by a token."""
    field = "algorithm.critic.path"
    folder = check_weights_folder(critic, field=field)
    sizes = [vocabulary(path) for path in (Path(model), folder)]
    if None not in sizes and sizes[0] != sizes[1]:
        reason = f"it knows {sizes[1]} tokens and the policy {sizes[0]}"
        raise refused(field, critic, reason, "give a model with the policy's tokenizer.")


def _rest(spec: JobSpec) -> Iterator[str]:
    if spec.trainer.backend == "megatron":
        yield from _attempt(check_megatron, spec)
    else:
        yield from _attempt(fsdp2.parse, spec.trainer.backend_options)
    yield from map(str, engines.mistakes_of(spec.rollout.engine_options))
    yield from _attempt(check_trackers, spec.tracking.trackers)
    yield from _attempt(_output, Path(spec.output))


def _output(folder: Path) -> None:
    """The trainer writes its checkpoints there, this service the report. Leaves nothing behind: a job that is only
    looked at, or refused, makes no folders."""
    if not folder.is_absolute():
        return
    try:
        for needed in (folder, folder / "checkpoints"):
            tempfile.TemporaryFile(dir=_nearest_there(needed)).close()
    except OSError as error:
        fix = "choose a folder that the services may write."
        raise refused("output", str(folder), f"it cannot be written: {error.strerror or error}", fix) from error


def _nearest_there(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists. Raises NotADirectoryError where that is a file."""
    found = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not found.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{found} is no folder")
    return found
