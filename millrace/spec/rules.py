"""Rules between fields. Each mistake comes with the arithmetic and the fix. Pure: looks at no file and no service.

What needs the machine (does the folder exist, does the reward function import) is checked at submission by
`millrace.admission.submission`.
"""

from collections.abc import Iterator

from millrace.backends import BACKENDS
from millrace.engines import ENGINES
from millrace.errors import Mistake, wrong_value
from millrace.spec.algorithm import Algorithm
from millrace.spec.job import PLACEHOLDER, PLACEHOLDERS, JobSpec
from millrace.spec.lora import Lora
from millrace.spec.pool_rules import broken_judges, broken_pools
from millrace.spec.schedule import OF_EVALUATIONS
from millrace.spec.trainer import CriticRun, ReferenceRun
from millrace.trackers import WITH_KEY
from millrace.validation import limits


def broken_rules(spec: JobSpec) -> list[Mistake]:
    """Every rule that the spec breaks."""
    return [
        *_output(spec),
        *_data(spec),
        *_images(spec),
        *_tower(spec),
        *_schedule(spec),
        *_reward(spec),
        *_sizes(spec),
        *_amounts(spec),
        *_agent(spec),
        *_staleness(spec),
        *_algorithm(spec),
        *_roles(spec),
        *_optimizers(spec),
        *_lora(spec),
        *broken_judges(spec),
        *broken_pools(spec),
        *_tracking(spec),
    ]


def _tracking(spec: JobSpec) -> Iterator[Mistake]:
    key, names = spec.tracking.api_key, spec.tracking.trackers
    if key is not None and WITH_KEY not in names:
        reason = f"only {WITH_KEY} takes a key, and it is not one of tracking.trackers"
        yield _broken("tracking.api_key", key, reason, "leave it out; mlflow reads MLFLOW_TRACKING_TOKEN")


def _broken(field: str, value: object, reason: str, fix: str) -> Mistake:
    return wrong_value(field, value, reason, f"{fix}.")


def _output(spec: JobSpec) -> Iterator[Mistake]:
    for name in PLACEHOLDER.findall(spec.output):
        if name not in PLACEHOLDERS:
            known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
            yield _broken("output", spec.output, f"{{{name}}} stands for nothing", f"use {known}, or no braces")


def _schedule(spec: JobSpec) -> Iterator[Mistake]:
    """Metrics by which a job stops or keeps a checkpoint exist at some step."""
    schedule, every = spec.schedule, 0 if spec.evaluation is None else spec.evaluation.every_steps
    stop = schedule.stop_when
    if stop is not None and stop.solved_at is None and stop.flat_steps is None:
        reason = "neither schedule.stop_when.solved_at nor schedule.stop_when.flat_steps is given"
        yield _broken("schedule.stop_when", stop.metric, reason, "give one of them, or both")
    named = [("schedule.stop_when.metric", stop.metric)] if stop is not None else []
    if schedule.keep_best is not None:
        named.append(("schedule.keep_best", schedule.keep_best))
        if schedule.save_every_steps == 0:
            reason = "only the last step is saved"
            yield _broken("schedule.keep_best", schedule.keep_best, reason, "set schedule.save_every_steps")
    for field, metric in named:
        if metric.removeprefix("-").startswith(OF_EVALUATIONS) and every == 0:
            reason = "evaluation.every_steps is not given, so no step before the last has it"
            yield _broken(field, metric, reason, "set evaluation.every_steps")
    if stop is not None and stop.flat_steps is not None and stop.flat_steps < every:
        reason = f"it would compare windows without an evaluation, which there is every {every} steps"
        yield _broken("schedule.stop_when.flat_steps", stop.flat_steps, reason, f"raise it to at least {every}")


def _data(spec: JobSpec) -> Iterator[Mistake]:
    for field, data in (("data", spec.data), ("evaluation", spec.evaluation)):
        if data is None:
            continue
        if bool(data.files) == bool(data.procedural):
            both = f"both {field}.files and {field}.procedural are given"
            reason = both if data.files else f"neither {field}.files nor {field}.procedural is given"
            yield _broken(f"{field}.files", data.files, reason, "give one of the two")
        if data.procedural and not data.procedural.startswith("reasoning_gym:"):
            fix = "write reasoning_gym:<task>, for example reasoning_gym:spell_backward"
            yield _broken(f"{field}.procedural", data.procedural, "there is no such kind of source", fix)


def _images(spec: JobSpec) -> Iterator[Mistake]:
    """What was not shown to be right with images, or has no place for them."""
    if spec.data.images is None:
        return
    given = {
        "rollout.environment": spec.rollout.environment,
        "rollout.agent": spec.rollout.agent,
        "algorithm.critic": spec.algorithm.critic,
        "algorithm.distillation": spec.algorithm.distillation,
        "pools": spec.pools or None,
    }
    for field, value in given.items():
        if value is not None:
            reason = f"{field} is given too, which jobs with images do not support yet"
            yield _broken("data.images", "given", reason, "leave one of them out")
    if not BACKENDS[spec.trainer.backend].takes_images:
        takes = " or ".join(name for name, backend in BACKENDS.items() if backend.takes_images)
        reason = "this backend does not train on the images of data.images"
        yield _broken("trainer.backend", spec.trainer.backend, reason, f"use {takes}, or leave data.images out")
    if spec.data.prompt_format == "text":
        reason = "images have their places in messages, and data.images is given"
        yield _broken("data.prompt_format", "text", reason, "set it to auto, or leave data.images out")
    if spec.data.procedural:
        reason = "a procedural source has no images, and data.images is given"
        yield _broken("data.procedural", spec.data.procedural, reason, "give data.files, or leave data.images out")
    if spec.data.overlong_prompts != "drop":
        reason = "a cut could take a part of an image, and data.images is given"
        yield _broken("data.overlong_prompts", spec.data.overlong_prompts, reason, "set it to drop")


def _tower(spec: JobSpec) -> Iterator[Mistake]:
    """What a trained tower needs, and what was not shown to be right with it."""
    if not spec.trainer.train_tower:
        return
    field = "trainer.train_tower"
    if spec.data.images is None:
        reason = "no prompt has an image, since data.images is not given"
        yield _broken(field, True, reason, "give data.images, or leave the option out")
    if spec.model.lora is not None:
        reason = "model.lora freezes every weight of the model, and has no adapter for its tower"
        yield _broken(field, True, reason, "leave one of them out")
    if not BACKENDS[spec.trainer.backend].trains_towers:
        able = " or ".join(name for name, backend in BACKENDS.items() if backend.trains_towers)
        reason = f"the backend {spec.trainer.backend} keeps the tower frozen"
        yield _broken(field, True, reason, f"set trainer.backend to {able}, or leave the option out")


def _reward(spec: JobSpec) -> Iterator[Mistake]:
    """Several functions are given instead of one, with a name each, and some of them count."""
    reward, names = spec.reward, [each.name for each in spec.reward.functions]
    if not names:
        return
    for alone in ("function", "scope", "options"):
        if (value := getattr(reward, alone)) != type(reward).model_fields[alone].get_default(call_default_factory=True):
            reason = "reward.functions is given too, and each of its functions has its own"
            yield _broken(f"reward.{alone}", value, reason, "move it into reward.functions, or leave that out")
    for number, name in enumerate(names):
        field = f"reward.functions.{number}.name"
        if name == "score":
            yield _broken(field, name, "is the name of the sum", "choose another one")
        elif name in names[:number]:
            yield _broken(field, name, "an earlier function has this name", "give each function a name of its own")
    if all(each.weight == 0.0 for each in reward.functions):
        weights = [each.weight for each in reward.functions]
        yield _broken("reward.functions", weights, "every weight is 0, so every reward would be", "raise one of them")


def _agent(spec: JobSpec) -> Iterator[Mistake]:
    """An agent is run by the replica or elsewhere, and it is the only one that plays the episodes."""
    if (agent := spec.rollout.agent) is None:
        return
    if bool(agent.command) == agent.external:
        both = "both rollout.agent.command and rollout.agent.external are given"
        reason = both if agent.external else "neither rollout.agent.command nor rollout.agent.external is given"
        yield _broken("rollout.agent.command", agent.command, reason, "give one of the two")
    if spec.rollout.environment is not None:
        reason = "rollout.environment is given too, and an episode has one of the two"
        yield _broken("rollout.agent", agent.command or "external", reason, "leave one of them out")


def _sizes(spec: JobSpec) -> Iterator[Mistake]:
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    if spec.trainer.token_budget < longest:
        arithmetic = (
            f"one trajectory may have {spec.data.max_prompt_tokens} + {spec.rollout.max_response_tokens} = {longest} "
            "tokens (data.max_prompt_tokens + rollout.max_response_tokens), more than a micro-batch holds"
        )
        yield _broken("trainer.token_budget", spec.trainer.token_budget, arithmetic, f"raise it to at least {longest}")
    if spec.schedule.prompts_per_step % spec.trainer.updates_per_step:
        arithmetic = (
            f"{spec.schedule.prompts_per_step} groups do not divide into {spec.trainer.updates_per_step} updates"
        )
        yield _broken("trainer.updates_per_step", spec.trainer.updates_per_step, arithmetic, "choose a divisor")
    if spec.schedule.steps == 0 and spec.evaluation is None:
        reason = "a job without steps only evaluates, and there is no evaluation"
        yield _broken("schedule.steps", 0, reason, "add `evaluation`, or train some steps")
    for engine, descriptor in ENGINES.items():
        context = spec.rollout.options_of(engine).get(descriptor.context_option)
        if isinstance(context, int) and context < longest:
            field = spec.rollout.field_of(engine, descriptor.context_option)
            arithmetic = f"prompt and response may have {longest} tokens"
            yield _broken(field, context, arithmetic, f"raise it to at least {longest}")


def _amounts(spec: JobSpec) -> Iterator[Mistake]:
    """Products of numbers each of which may be large by itself."""
    schedule, samples, evaluation = spec.schedule, spec.rollout.samples_per_prompt, spec.evaluation
    in_flight = schedule.prompts_per_step * (schedule.max_staleness + 1) + schedule.carried_prompts
    if in_flight > limits.MOST_IN_FLIGHT:
        arithmetic = (
            f"with max_staleness {schedule.max_staleness} and carried_prompts {schedule.carried_prompts} "
            f"up to {in_flight} prompts would be in flight, more than "
            f"{limits.MOST_IN_FLIGHT}"
        )
        yield _broken("schedule.prompts_per_step", schedule.prompts_per_step, arithmetic, "lower one of them")
    if (trajectories := schedule.prompts_per_step * samples) > limits.MOST_TRAJECTORIES:
        arithmetic = f"a step of {schedule.prompts_per_step} prompts would have {trajectories} trajectories"
        fix = f"lower it or schedule.prompts_per_step, to {limits.MOST_TRAJECTORIES} together"
        yield _broken("rollout.samples_per_prompt", samples, arithmetic, fix)
    if (least := spec.rollout.min_samples) is not None and least > samples:
        arithmetic = f"a group has {samples} samples, which are rollout.samples_per_prompt"
        yield _broken("rollout.min_samples", least, arithmetic, f"lower it to at most {samples}, or leave it out")
    if evaluation is None:
        return
    if (trajectories := evaluation.prompts * evaluation.samples_per_prompt) > limits.MOST_TRAJECTORIES:
        arithmetic = f"an evaluation of {evaluation.prompts} prompts would have {trajectories} answers"
        fix = f"lower it or evaluation.prompts, to {limits.MOST_TRAJECTORIES} together"
        yield _broken("evaluation.samples_per_prompt", evaluation.samples_per_prompt, arithmetic, fix)
    if 0.0 < evaluation.temperature < limits.LOWEST_TEMPERATURE:
        fix = f"set it to 0, which is greedy, or to at least {limits.LOWEST_TEMPERATURE}"
        yield _broken("evaluation.temperature", evaluation.temperature, "engines do not sample at it", fix)


def _roles(spec: JobSpec) -> Iterator[Mistake]:
    """What is said of reference and critic belongs to a model that the job has, and to what may differ for it."""
    runs: dict[str, tuple[ReferenceRun | CriticRun, bool, str]] = {
        "reference": (spec.trainer.reference, spec.algorithm.kl is not None, "algorithm.kl"),
        "critic": (spec.trainer.critic, spec.algorithm.critic is not None, "algorithm.critic"),
    }
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    for role, (run, exists, made_by) in runs.items():
        field = f"trainer.{role}"
        given = next(iter(run.model_dump(exclude_defaults=True)), None)
        if not exists and given is not None:
            reason = f"the job has no {role}, because it has no {made_by}"
            yield _broken(f"{field}.{given}", getattr(run, given), reason, f"leave it out, or set {made_by}")
        if run.token_budget is not None and run.token_budget < longest:
            arithmetic = (
                f"one trajectory may have {longest} tokens (data.max_prompt_tokens + rollout.max_response_tokens)"
            )
            yield _broken(f"{field}.token_budget", run.token_budget, arithmetic, f"raise it to at least {longest}")
        allowed = BACKENDS[spec.trainer.backend].role_options.get(role, frozenset())
        for option, value in run.backend_options.items():
            if option not in allowed:
                reason = f"the {role} has the policy's value of every option except {', '.join(sorted(allowed))}"
                yield _broken(f"{field}.backend_options.{option}", value, reason, "leave it out")
    if spec.model.lora is not None and spec.trainer.reference.backend_options:
        reason = "with model.lora the reference is the policy without its adapter, and no model of its own"
        yield _broken(
            "trainer.reference.backend_options", spec.trainer.reference.backend_options, reason, "leave it out"
        )


def _staleness(spec: JobSpec) -> Iterator[Mistake]:
    schedule = spec.schedule
    if schedule.too_stale == "train":
        if not spec.algorithm.corrections:
            reason = "nothing would weigh tokens of old versions"
            fix = "set algorithm.correction, for example {name: tis_token}, or choose regenerate or drop"
            yield _broken("schedule.too_stale", schedule.too_stale, reason, fix)
    elif schedule.carried_prompts and schedule.max_staleness == 0:
        reason = "answers that go on in the next step are too stale for max_staleness 0"
        fix = "set schedule.max_staleness to at least 1, or leave it out"
        yield _broken("schedule.carried_prompts", schedule.carried_prompts, reason, fix)


def _algorithm(spec: JobSpec) -> Iterator[Mistake]:
    algorithm = spec.algorithm
    if algorithm.overlong_buffer_tokens > spec.rollout.max_response_tokens:
        arithmetic = f"the buffer is longer than a response, {spec.rollout.max_response_tokens} tokens"
        yield _broken(
            "algorithm.overlong_buffer_tokens", algorithm.overlong_buffer_tokens, arithmetic, "make it shorter"
        )
    if algorithm.kl_in == "reward" and algorithm.kl is None:
        yield _broken("algorithm.kl_in", "reward", "there is no KL", "set algorithm.kl, for example {name: k1}")
    if algorithm.router_replay and not BACKENDS[spec.trainer.backend].replays_experts:
        able = " or ".join(name for name, backend in BACKENDS.items() if backend.replays_experts)
        reason = f"the backend {spec.trainer.backend} cannot send tokens to given experts"
        yield _broken("algorithm.router_replay", True, reason, f"set trainer.backend to {able}, or leave it out")
    if algorithm.kl_target is not None and algorithm.kl is None:
        fix = "set algorithm.kl, or leave it out"
        yield _broken("algorithm.kl_target", algorithm.kl_target, "there is no KL to steer", fix)
    given = algorithm.kl_coefficient
    if algorithm.kl_target is not None and algorithm.kl is not None and given == 0.0:
        fix = "give it a value above 0 to start from, or leave algorithm.kl_target out"
        yield _broken("algorithm.kl_coefficient", given, "kl_target multiplies it, and 0 stays 0", fix)
    if algorithm.kl is None and given not in (0.0, Algorithm.model_fields["kl_coefficient"].default):
        fix = "set algorithm.kl, for example {name: k3}, or leave it out"
        yield _broken("algorithm.kl_coefficient", given, "there is no KL for it to weigh", fix)
    if algorithm.drop_groups_without_signal and spec.rollout.smallest_group < 2:
        reason = "the rewards in a group of one answer are always equal, so every group would be dropped"
        fix = "raise it to at least 2, or set algorithm.drop_groups_without_signal to false"
        field = "samples_per_prompt" if spec.rollout.min_samples is None else "min_samples"
        yield _broken(f"rollout.{field}", spec.rollout.smallest_group, reason, fix)


def _lora(spec: JobSpec) -> Iterator[Mistake]:
    if spec.model.lora is None:
        return
    if not BACKENDS[spec.trainer.backend].trains_adapters:
        able = " or ".join(name for name, backend in BACKENDS.items() if backend.trains_adapters)
        reason = f"the backend {spec.trainer.backend} cannot train adapters"
        yield _broken("model.lora", spec.model.lora.rank, reason, f"set trainer.backend to {able}, or leave it out")
    if not spec.model.lora.target_modules:
        fix = 'name some, or write "all-linear"'
        yield _broken("model.lora.target_modules", [], "no layer would have an adapter", fix)
    if not spec.model.lora.merge:
        yield from _adapter_alone(spec.model.lora, spec.trainer.backend)


def _adapter_alone(lora: Lora, backend: str) -> Iterator[Mistake]:
    """What prevents replicas from getting the adapter alone."""
    if lora.dora:
        reason = "engines cannot serve DoRA, which changes the length of each row of a weight"
    elif not BACKENDS[backend].publishes_adapters:
        reason = f"the backend {backend} publishes merged weights only"
    else:
        return
    yield _broken("model.lora.merge", False, reason, "set it to true")


def _optimizers(spec: JobSpec) -> Iterator[Mistake]:
    if spec.schedule.steps and spec.trainer.optimizer.warmup_steps > spec.schedule.steps:
        arithmetic = f"warm-up is longer than the job, {spec.schedule.steps} steps"
        yield _broken("trainer.optimizer.warmup_steps", spec.trainer.optimizer.warmup_steps, arithmetic, "shorten it")
    optimizers = {"trainer.optimizer": spec.trainer.optimizer}
    if (critic := spec.algorithm.critic) is not None:
        optimizers["algorithm.critic.optimizer"] = critic.optimizer
        if spec.schedule.steps and critic.warmup_steps >= spec.schedule.steps:
            arithmetic = f"the policy would not be trained in any of the job's {spec.schedule.steps} steps"
            yield _broken("algorithm.critic.warmup_steps", critic.warmup_steps, arithmetic, "shorten it")
    for field, optimizer in optimizers.items():
        if optimizer.schedule != "constant" and spec.schedule.steps is None:
            reason = "the learning rate falls until the last step, and schedule.steps does not say which that is"
            yield _broken(f"{field}.schedule", optimizer.schedule, reason, 'set schedule.steps, or use "constant"')
