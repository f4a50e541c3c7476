"""Whether a job can run on this machine: every mistake is found before the job is accepted, and all are reported at
once.

Paths have to be absolute. Every service opens them itself, and each would resolve a relative path in its own working
folder. A client does not resolve them either, because the services may run on other machines. In `output`
placeholders stand for parts of the path (`with_output`), and no earlier job may have left checkpoints there.
"""

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from millrace import engines, hub
from millrace.admission import choices, engine_options
from millrace.admission.pools import check_pool
from millrace.admission.pools import mistakes_of as mistakes_of_judge
from millrace.backends import BACKENDS, FIELD
from millrace.checkpoints.source import check_checkpoint
from millrace.data import PromptSource, open_section
from millrace.data.model_folder import check_model_folder, check_weights_folder, context, vocabulary
from millrace.data.pictures import check_takes_images
from millrace.descriptors import imported
from millrace.environments.registry import check as check_environment
from millrace.errors import InvalidJob, Mistake, Unavailable, refused, wrong_value
from millrace.ids import JobId, new_job_id
from millrace.lora import FIELD as ADAPTER_FIELD
from millrace.lora import with_folder
from millrace.rewards import NEED_TRUTHS, Term
from millrace.rewards import check as check_reward
from millrace.rewards.locate import Target
from millrace.spec import parse
from millrace.spec.job import PLACEHOLDER, JobSpec
from millrace.spec.model import Model
from millrace.spec.passes import needs_whole_batch
from millrace.spec.schedule import Webhook
from millrace.spec.trainer import ROLES
from millrace.trackers import check_trackers
from millrace.validation.mistakes import options as checked_options
from millrace.validation.places import ROOTS, check_store, lies_below, roots
from millrace.validation.secrets import secret_of_job
from millrace.validation.urls import check_of_job

RUNS = "MILLRACE_RUNS"
"""Environment variable of the coordinator with the folder that `{runs}` stands for."""


def with_output(spec: JobSpec, job_id: JobId | None = None) -> JobSpec:
    """The spec with values in the place of the placeholders of `output`. Without a `job_id` that of a job that will
    not exist."""
    if PLACEHOLDER.search(spec.output) is None:
        return spec
    values = {
        "name": spec.name.replace(" ", "-"),
        "id": job_id or new_job_id(),
        "date": time.strftime("%Y-%m-%d"),
        "runs": os.environ.get(RUNS) or str(Path.home() / "millrace" / "runs"),
    }
    output = PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), spec.output)
    return spec.model_copy(update={"output": output})


def left_checkpoints(output: str, others: Sequence[str] = ()) -> Iterator[Mistake]:
    """A mistake if the folder holds checkpoints. `others` are more ways to correct it."""
    checkpoints = Path(output) / "checkpoints"
    if os.path.isdir(checkpoints) and any(checkpoints.glob("step-*")):
        reason = f"{checkpoints} holds checkpoints of an earlier job, which this one would replace"
        fixes = ["give another folder ({id} in its path makes one for each job)", *others, "or remove them"]
        yield wrong_value("output", output, reason, f"{', '.join(fixes)}.")


def check(tree: Any) -> JobSpec:
    """The spec in `tree`, once it is clear that it can run here. Names on the hub are pinned to a commit, and the
    options of `model.lora` are those of its folder, if it names one. Raises InvalidJob with every mistake. Reads files,
    and downloads those that are named on the hub, but for weights."""
    spec = with_output(parse(tree))
    if too_long := list(_too_long(spec)):
        raise InvalidJob.of(too_long, "the job cannot run:")
    _keep_inside(spec)  # before anything there is looked at
    try:
        spec = hub.pinned(spec)
        _keep_inside(spec)  # with the files that patterns stand for
        here = hub.local(spec, data=True)
    except Unavailable as error:
        raise InvalidJob(error.what, error.fix) from error
    mistakes = [*_relative(here), *_data(here, spec), *_algorithm(here, spec), *_pools(here, spec), *_rest(here)]
    if mistakes:
        raise InvalidJob.of(mistakes, "the job cannot run:")
    if spec.trainer.streaming is True and (reason := needs_whole_batch(spec)):
        fix = 'set it to "auto", which takes such steps as a whole, or change what the reason names.'
        raise refused("trainer.streaming", True, reason, fix)
    return with_folder(spec)


def _attempt(check: Callable[..., object], *arguments: Any, **named: Any) -> Iterator[Mistake]:
    """The mistakes that one check finds."""
    try:
        check(*arguments, **named)
    except InvalidJob as error:
        yield from error.mistakes


def _relative(spec: JobSpec) -> Iterator[Mistake]:
    for field, path, function in _paths(spec):
        if not Path(path).is_absolute():
            reason = "is not an absolute path, and each service would look in its own working folder"
            absolute = os.path.abspath(os.path.expanduser(path))
            likely = field == "output" or os.path.exists(absolute)
            fix = f"write the absolute path, for example {absolute}{function}." if likely else "write an absolute path."
            yield wrong_value(field, path + function, reason, fix)


def _keep_inside(spec: JobSpec) -> None:
    """Raises InvalidJob with every path outside the folders that jobs may use."""
    if outside := list(_outside(spec)):
        raise InvalidJob.of(outside, "the job cannot run:")


def _outside(spec: JobSpec) -> Iterator[Mistake]:
    """Paths that lead out of the folders of MILLRACE_ROOTS, if that is set, also by symbolic links. Names on the hub
    are no paths."""
    allowed = roots()
    for field, path, function in _paths(spec):
        place = os.path.realpath(path)
        if allowed and os.path.isabs(path) and not lies_below(place, allowed):
            leads = "lies" if place == os.path.normpath(path) else "leads"
            reason = f"{leads} outside the folders that jobs may use"
            fix = f"put it below one of {', '.join(allowed)}, or have an operator add its folder to {ROOTS}."
            yield wrong_value(field, path + function, reason, fix)


def _too_long(spec: JobSpec) -> Iterator[Mistake]:
    """Names so long that the system cannot look for the file."""
    for field, path, function in _paths(spec):
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                yield wrong_value(field, path + function, "is too long for the name of a file", "give another path.")


def _paths(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Each field that names a file or folder, its path, and `:function` if a function in the file is named."""
    yield "output", spec.output, ""
    yield "model.path", spec.model.path, ""
    if spec.model.weights is not None:
        yield "model.weights", spec.model.weights, ""
    if spec.model.lora is not None and spec.model.lora.adapter_path is not None:
        yield ADAPTER_FIELD, spec.model.lora.adapter_path, ""
    critic = spec.algorithm.critic
    if critic is not None and critic.path is not None:
        yield "algorithm.critic.path", critic.path, ""
    yield from ((f"pools.{number}.path", pool.path, "") for number, pool in enumerate(spec.pools))
    for field, data in (("data.files", spec.data), ("evaluation.files", spec.evaluation)):
        yield from ((field, file, "") for file in (data.files if data is not None else ()))
    named = [(f"reward.functions.{n}.function", each.function) for n, each in enumerate(spec.reward.functions)]
    for term in spec.reward.judge_terms:
        if term.judge.prompt_file is not None:
            yield f"{term.field}.prompt_file", term.judge.prompt_file, ""
    for field, name in named or [("reward.function", spec.reward.function)]:
        if name is None:
            continue
        place, colon, function = name.rpartition(":")
        if Target(place, function).is_file:
            yield field, place, colon + function
    if (environment := spec.rollout.environment) is not None:
        place, colon, name = environment.name.rpartition(":")
        if Target(place, name).is_file:
            yield "rollout.environment.name", place, colon + name
    for _, choice, field in choices.chosen(spec.algorithm):
        if ":" in choice.name:
            place, colon, function = choice.name.rpartition(":")
            yield f"{field}.name", place, colon + function


def _data(spec: JobSpec, named_spec: JobSpec) -> Iterator[Mistake]:
    """The data, the rewards that its rows ask for, and the model with the chat template that its prompts need. In
    `named_spec` they may have names on the hub, of which the weights are not here."""
    mistakes: list[Mistake] = []
    messages, terms = False, dict[tuple[str, str], Term]()
    sections: tuple[Literal["data", "evaluation"], ...] = ("data", "evaluation")
    for section in sections:
        try:
            if (source := open_section(spec, section)) is None:
                continue
            first, procedural = source[0], getattr(spec, section).procedural is not None
            messages = messages or isinstance(first.prompt, list)
            chosen = spec.reward.terms(procedural=procedural, style=first.reward_style, data_source=first.data_source)
            terms |= {(term.field, term.function): term for term in chosen}
            if first.ground_truth is None and (needing := [t for t in chosen if t.function in NEED_TRUTHS]):
                mistakes.append(_no_truth(spec, section, needing[0], source))
        except InvalidJob as error:
            mistakes += error.mistakes
    yield from dict.fromkeys(mistakes)
    weights = named_spec.model.path == spec.model.path and spec.model.weights is None
    unusable = list(_attempt(check_model_folder, spec.model.path, messages=messages, weights=weights))
    yield from unusable or _attempt(_context, spec)
    if spec.data.images is not None and not unusable:
        yield from _attempt(check_takes_images, Path(spec.model.path))
    if not unusable:
        yield from _attempt(_checkpoint, spec.model)
    for _, term in sorted(terms.items()):
        yield from _attempt(check_reward, term.function, term.options, term.scope, term.field)


def _no_truth(spec: JobSpec, section: str, term: Term, source: PromptSource) -> Mistake:
    """A built-in reward has nothing to compare answers with."""
    reason = f"the reward {term.function} compares answers with a ground truth, and the first row has none"
    fix = f"name its column in {section}.columns ({{ground_truth: COLUMN}}), or another reward in reward.function."
    taken = "; ".join(source.description)
    return wrong_value(f"{section}.files", getattr(spec, section).files, f"{reason} ({taken})", fix)


def _checkpoint(model: Model) -> None:
    """The distributed checkpoint of the model, if it has one. Raises InvalidJob."""
    if model.weights is None:
        check_checkpoint(Path(model.path), None, "model.path")
    else:
        check_checkpoint(Path(model.path), Path(model.weights))


def _context(spec: JobSpec) -> None:
    """The model has positions for the longest text, unless an engine's options change them. Raises InvalidJob."""
    for name, engine in engines.ENGINES.items():
        if not engine.position_options.isdisjoint(spec.rollout.options_of(name)):
            return
    prompt, response = spec.data.max_prompt_tokens, spec.rollout.max_response_tokens
    if (most := context(Path(spec.model.path))) is not None and prompt + response > most:
        reason = (
            f"with data.max_prompt_tokens: {prompt} a text may have {prompt + response} tokens, and the model has "
            f"positions up to {most} (max_position_embeddings in its config.json)"
        )
        fix = f"lower the two to {most} together, or give the model's config a rope_scaling."
        raise refused("rollout.max_response_tokens", response, reason, fix)


def _algorithm(spec: JobSpec, named_spec: JobSpec) -> Iterator[Mistake]:
    yield from choices.mistakes_of(spec)
    critic = spec.algorithm.critic
    if critic is not None and critic.path is not None:
        yield from _attempt(_critic_folder, spec.model.path, critic.path, critic == named_spec.algorithm.critic)


def _critic_folder(model: str, critic: str, weights: bool) -> None:
    """The critic's folder, with the policy's tokens: it judges the policy's text token by token. Raises InvalidJob."""
    field = "algorithm.critic.path"
    folder = check_weights_folder(critic, field=field, weights=weights)
    check_checkpoint(folder, None, field)
    sizes = [vocabulary(path) for path in (Path(model), folder)]
    if None not in sizes and sizes[0] != sizes[1]:
        reason = f"has a vocabulary of {sizes[1]} tokens, the policy's has {sizes[0]}"
        raise refused(field, critic, reason, "give a model with the policy's tokenizer.")


def _pools(spec: JobSpec, named_spec: JobSpec) -> Iterator[Mistake]:
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    for number, (pool, named) in enumerate(zip(spec.pools, named_spec.pools, strict=True)):
        for task in spec.pool_tasks(pool.name):
            field = f"pools.{number}.path"
            yield from _attempt(check_pool, spec.model.path, pool, task, field, longest=longest, weights=named == pool)


def _rest(spec: JobSpec) -> Iterator[Mistake]:
    unusable = list(_attempt(with_folder, spec))
    yield from unusable or _attempt(_backend, spec)
    for term in spec.reward.judge_terms:
        yield from mistakes_of_judge(term)
    yield from engine_options.mistakes_of(spec.rollout.engine_options)
    if (environment := spec.rollout.environment) is not None:
        yield from _attempt(check_environment, environment.name, environment.options, has_servers=bool(environment.mcp))
    yield from _attempt(check_trackers, spec.tracking.trackers)
    if spec.tracking.api_key is not None:
        yield from _attempt(secret_of_job, spec.tracking.api_key, "tracking.api_key")
    if spec.schedule.checkpoint_store is not None:
        yield from _attempt(check_store, spec.schedule.checkpoint_store)
    for number, webhook in enumerate(spec.webhooks):
        yield from _attempt(check_webhook, webhook, f"webhooks.{number}")
    yield from _attempt(_output, Path(spec.output))


def check_webhook(webhook: Webhook, field: str) -> None:
    """Raises InvalidJob if the webhook may not be called, or a secret of it is not there."""
    url = webhook.url
    if not url.startswith("http"):
        url = secret_of_job(url, f"{field}.url").get_secret_value()
    check_of_job(url, f"{field}.url", webhook.url)
    if webhook.secret is not None:
        secret_of_job(webhook.secret, f"{field}.secret")


def _backend(spec: JobSpec) -> None:
    backend = BACKENDS[spec.trainer.backend]
    checked_options(backend.options, spec.trainer.backend_options, FIELD)
    for role in ROLES:
        own = getattr(spec.trainer, role).backend_options
        given = {name: value for name, value in own.items() if value is not None}
        checked_options(backend.options, given, f"trainer.{role}.backend_options")
    if backend.check:
        imported(backend.check)(spec)


def _output(folder: Path) -> None:
    """The folder can be written: the trainer writes checkpoints there, the coordinator the report. Nothing is left
    behind, because a job that is only checked, or refused, must not make folders. Raises InvalidJob."""
    if not folder.is_absolute():
        return
    try:
        for needed in (folder, folder / "checkpoints"):
            tempfile.TemporaryFile(dir=_nearest_existing(needed)).close()
    except OSError as error:
        fix = "choose a folder that the services may write."
        raise refused("output", str(folder), f"cannot be written: {error.strerror or error}", fix) from error


def _nearest_existing(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists. Raises NotADirectoryError if that is a file."""
    found = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not found.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{found} is not a folder")
    return found
