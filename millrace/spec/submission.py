"""Whether a job can work on this machine: every mistake is found before it is taken in, and all are told at once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from millrace.data import open_source
from millrace.data.model_folder import check_model_folder
from millrace.errors import InvalidJob
from millrace.megatron.rules import check_submission as check_megatron
from millrace.rewards import check as check_reward
from millrace.rewards import choose
from millrace.rl.catalogue import AGGREGATIONS, KL_ESTIMATORS, Kind, find
from millrace.spec import JobSpec, parse
from millrace.spec.algorithm import Choice
from millrace.telemetry.trackers import check as check_trackers


def check(tree: Any) -> JobSpec:
    """The spec in `tree`, which can be carried out here. Raises InvalidJob with every mistake. Reads files."""
    spec = parse(tree)
    mistakes = [*_data(spec), *_algorithm(spec), *_rest(spec)]
    if mistakes:
        raise InvalidJob("\n".join(["the job cannot work:", *(f"  {mistake}" for mistake in mistakes)]))
    return spec


def _attempt(look: Callable[..., Any], *arguments: Any, **named: Any) -> Iterator[str]:
    try:
        look(*arguments, **named)
    except InvalidJob as error:
        yield str(error)


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
    yield from _attempt(check_model_folder, spec.model.path, messages=messages)
    for name in sorted(rewards):
        yield from _attempt(check_reward, name, spec.reward.options)


def _algorithm(spec: JobSpec) -> Iterator[str]:
    algorithm = spec.algorithm
    yield from _attempt(_choice, Kind.ADVANTAGE, algorithm.advantage, "algorithm.advantage")
    yield from _attempt(_choice, Kind.POLICY_LOSS, algorithm.policy_loss, "algorithm.policy_loss")
    if (correction := algorithm.correction) is not None:
        yield from _attempt(_choice, Kind.CORRECTION, correction, "algorithm.correction")
    if algorithm.aggregation not in AGGREGATIONS:
        yield _unknown("algorithm.aggregation", algorithm.aggregation, AGGREGATIONS)
    if algorithm.kl is not None and algorithm.kl.name not in KL_ESTIMATORS:
        yield _unknown("algorithm.kl.name", algorithm.kl.name, KL_ESTIMATORS)
    if algorithm.kl is not None and algorithm.kl.options:
        yield f"algorithm.kl.options: {algorithm.kl.options} will not do: a KL estimate has none. Mend: remove them."


def _choice(kind: Kind, choice: Choice, where: str) -> None:
    entry = find(kind, choice.name, f"{where}.name")
    entry.check(choice.options, f"{where}.options")
    if entry.needs_critic:
        what = f"{where}.name: {choice.name!r} will not do: it needs a critic, and no trainer backend has one."
        raise InvalidJob(what, "choose one without, for example grpo.")


def _unknown(field: str, value: str, known: tuple[str, ...]) -> str:
    return f"{field}: {value!r} will not do: there is none of that name. Mend: choose one of {', '.join(known)}."


def _rest(spec: JobSpec) -> Iterator[str]:
    if spec.trainer.backend == "megatron":
        yield from _attempt(check_megatron, spec)
    yield from _attempt(check_trackers, spec.tracking.trackers)
    yield from _attempt(_output, Path(spec.output))


def _output(folder: Path) -> None:
    """The trainer writes its checkpoints there, this service the report."""
    if not folder.is_absolute():
        what = f"output: {str(folder)!r} will not do: each service would take it from its own working folder."
        raise InvalidJob(what, f"write the whole path, for example {folder.absolute()}.")
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = folder / ".millrace"
        probe.touch()
        probe.unlink()
    except OSError as error:
        what = f"output: {str(folder)!r} will not do: it cannot be written: {error}."
        raise InvalidJob(what, "choose a folder that the services may write.") from error
