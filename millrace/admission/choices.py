"""Checks of the algorithm that a job chose: its functions exist, their options are valid, and the job has what they
read. Reads a user's own files; needs no torch."""

from collections.abc import Iterator
from itertools import product

from millrace.errors import InvalidJob, Mistake, wrong_value
from millrace.rl.registry.catalogue import AGGREGATIONS, KL_ESTIMATORS, AlgorithmEntry, AlgorithmKind, find
from millrace.spec.algorithm import Algorithm, Choice
from millrace.spec.job import JobSpec
from millrace.validation.names import choose

BEHAVIOUR = "behaviour_logprobs_bt"
"""Input of a policy loss: the log-probabilities of the engine."""
TEACHER_TOP = "teacher_top_logprobs_btk"
"""Input of a distillation loss: the log-probabilities of the teacher's most likely tokens."""
LARGEST_SCORES = 384 << 20
"""Bytes of the teacher's scores of one group. A group is one message, of at most 512 MiB."""
Entries = dict[AlgorithmKind, list[tuple[str, AlgorithmEntry]]]
"""The functions that a job names and that exist, by kind, each with the field of its name."""


def check(spec: JobSpec) -> None:
    """Raises InvalidJob with every mistake."""
    if mistakes := list(mistakes_of(spec)):
        raise InvalidJob.of(mistakes)


def needs_greedy_baseline(spec: JobSpec) -> bool:
    """Whether the job's advantage compares with a greedy answer to each prompt."""
    return "greedy_rewards_b" in find(AlgorithmKind.ADVANTAGE, spec.algorithm.advantage.name).inputs


def compares_within_groups(spec: JobSpec) -> bool:
    """Whether the job's advantage is 0 for a group whose rewards are equal: it compares the answers to one prompt."""
    return "group_b" in find(AlgorithmKind.ADVANTAGE, spec.algorithm.advantage.name).required_inputs


def teacher_top(spec: JobSpec) -> int | None:
    """Number of most likely tokens that the teacher reports in each place; None for a job without a teacher."""
    if (distillation := spec.algorithm.distillation) is None:
        return None
    entry = find(AlgorithmKind.DISTILLATION, distillation.loss.name)
    return distillation.top_k if TEACHER_TOP in entry.inputs else 0


def mistakes_of(spec: JobSpec) -> Iterator[Mistake]:
    """Every mistake in the choice of the algorithm."""
    algorithm = spec.algorithm
    if algorithm.aggregation not in AGGREGATIONS:
        yield _unknown("algorithm.aggregation", algorithm.aggregation, AGGREGATIONS)
    if algorithm.kl is not None and algorithm.kl.name not in KL_ESTIMATORS:
        yield _unknown("algorithm.kl.name", algorithm.kl.name, KL_ESTIMATORS)
    if algorithm.kl is not None and algorithm.kl.options:
        yield wrong_value("algorithm.kl.options", algorithm.kl.options, "a KL estimator has no options", "remove them.")
    entries: Entries = {kind: [] for kind in AlgorithmKind}
    for kind, choice, field in chosen(algorithm):
        try:
            entry = find(kind, choice.name, f"{field}.name")
            entry.check(choice.options, f"{field}.options")
        except InvalidJob as error:
            yield from error.mistakes
            continue
        entries[kind].append((f"{field}.name", entry))
    for _, entry in entries[AlgorithmKind.ADVANTAGE]:
        yield from _advantage(spec, entry)
    if entries[AlgorithmKind.DISTILLATION]:
        yield from _distillation(spec)
    yield from _weighted_once(algorithm, entries)
    yield from _correction_options(algorithm, entries)
    yield from _cut_distribution(spec, entries)


def chosen(algorithm: Algorithm) -> Iterator[tuple[AlgorithmKind, Choice, str]]:
    """The functions that a job names, each with its kind and its field."""
    yield AlgorithmKind.ADVANTAGE, algorithm.advantage, "algorithm.advantage"
    yield AlgorithmKind.POLICY_LOSS, algorithm.policy_loss, "algorithm.policy_loss"
    if algorithm.distillation is not None:
        yield AlgorithmKind.DISTILLATION, algorithm.distillation.loss, "algorithm.distillation.loss"
    for number, correction in enumerate(algorithm.corrections):
        place = f".{number}" if isinstance(algorithm.correction, tuple) else ""
        yield AlgorithmKind.CORRECTION, correction, f"algorithm.correction{place}"


def _advantage(spec: JobSpec, entry: AlgorithmEntry) -> Iterator[Mistake]:
    """The advantage has all its inputs, and nothing is computed that it does not read."""
    field = "algorithm.advantage.name"
    if entry.needs_critic and spec.algorithm.critic is None:
        fix = "add one, `critic: {}`, or choose an advantage without, for example grpo."
        yield wrong_value(field, entry.name, "it needs a critic, and algorithm.critic is not given", fix)
    if (critic := spec.algorithm.critic) is not None and "values_bt" not in entry.inputs:
        given = critic.model_dump(mode="json", exclude_defaults=True)
        reason = f"the advantage {entry.name!r} reads no values"
        yield wrong_value("algorithm.critic", given, reason, "leave it out, or choose gae.")
    yield from _group_size(spec, entry)
    yield from _separate_rewards(spec, entry)


def _distillation(spec: JobSpec) -> Iterator[Mistake]:
    """The teacher's scores of a group fit a message, and no group is dropped for rewards that are not trained."""
    algorithm, top = spec.algorithm, teacher_top(spec) or 0
    assert algorithm.distillation is not None
    if algorithm.drop_groups_without_signal and not algorithm.distillation.use_rewards:
        reason = "the rewards are not trained, so a group with equal ones teaches as much as others"
        fix = "set it to false, or set algorithm.distillation.use_rewards."
        yield wrong_value("algorithm.drop_groups_without_signal", True, reason, fix)
    tokens = spec.rollout.samples_per_prompt * spec.rollout.max_response_tokens
    if (needed := tokens * 8 * top) > LARGEST_SCORES:
        reason = (
            f"the teacher's scores of a group may have {needed >> 20:,} MiB, of {LARGEST_SCORES >> 20} that can be sent"
        )
        fix = f"lower it to {max(1, LARGEST_SCORES // (tokens * 8))}, or rollout.max_response_tokens."
        yield wrong_value("algorithm.distillation.top_k", algorithm.distillation.top_k, reason, fix)


def _group_size(spec: JobSpec, entry: AlgorithmEntry) -> Iterator[Mistake]:
    """A group is large enough for advantages other than 0. How a user's own function treats small groups is unknown."""
    options = entry.defaults | spec.algorithm.advantage.options
    if entry.is_user_defined or "group_b" not in entry.required_inputs or options.get("singleton") == "reward":
        return
    least, size = max(2, options.get("k", 0)), spec.rollout.smallest_group
    if size < least:
        reason = f"the advantage {entry.name!r} compares the answers to a prompt, and is 0 with fewer than {least}"
        fix = f"raise it to at least {least}, or choose an advantage that compares no answers, for example remax."
        field = "samples_per_prompt" if spec.rollout.min_samples is None else "min_samples"
        yield wrong_value(f"rollout.{field}", size, reason, fix)


def _separate_rewards(spec: JobSpec, entry: AlgorithmEntry) -> Iterator[Mistake]:
    parts, algorithm = spec.reward.parts, spec.algorithm
    reads_parts = "rewards_bk" in entry.inputs
    if "rewards_bk" in entry.required_inputs and not parts:
        fix = "name them in reward.parts: numbers that the reward function returns beside its score."
        yield wrong_value("algorithm.advantage.name", entry.name, "it needs several rewards of each answer", fix)
    if parts and not reads_parts:
        yield wrong_value("reward.parts", parts, f"the advantage {entry.name!r} reads one reward", "leave it out.")
    weights = algorithm.advantage.options.get("weights")
    if reads_parts and isinstance(weights, list | tuple) and parts and len(weights) != len(parts):
        reason = f"reward.parts names {len(parts)} rewards"
        yield wrong_value("algorithm.advantage.options.weights", weights, reason, "give one weight a reward.")
    if "token_rewards_bt" in entry.inputs:
        return
    ignored = f"the advantage {entry.name!r} reads the separate rewards only"
    if algorithm.overlong_buffer_tokens:
        fix = "make the penalty one of reward.parts, or leave it out."
        yield wrong_value("algorithm.overlong_buffer_tokens", algorithm.overlong_buffer_tokens, ignored, fix)
    if algorithm.kl is not None and algorithm.kl_in == "reward":
        yield wrong_value("algorithm.kl_in", "reward", ignored, "put it into the loss.")


def _weighted_once(algorithm: Algorithm, entries: Entries) -> Iterator[Mistake]:
    """No token is weighted twice for the engine's policy. What a user's own correction returns is unknown."""
    weighing = [
        (field, correction)
        for field, correction in entries[AlgorithmKind.CORRECTION]
        if correction.gives_weights and not correction.is_user_defined
    ]
    for field, correction in weighing[1:]:
        reason = f"{weighing[0][1].name} gives weights already; a token is weighted once"
        yield wrong_value(field, correction.name, reason, "keep one of the two; the others may only reject.")
    fix, twice = "leave the correction out, choose one that rejects, for example", "; it would count twice"
    for (field, correction), (_, loss) in product(weighing, entries[AlgorithmKind.POLICY_LOSS]):
        if algorithm.old_logprobs == "rollout" and "old_logprobs_bt" in loss.inputs:
            reason = f"with algorithm.old_logprobs: rollout the ratio in the loss is this weight already{twice}"
            yield wrong_value(field, correction.name, reason, f"{fix} reject_token, or set old_logprobs to recompute.")
        if BEHAVIOUR in loss.inputs:
            reason = f"the policy loss {loss.name!r} weights by the engine's log-probabilities itself{twice}"
            yield wrong_value(field, correction.name, reason, f"{fix} reject_token, or choose the loss ppo.")


def _correction_options(algorithm: Algorithm, entries: Entries) -> Iterator[Mistake]:
    """The bounds of a weight are in order, and there are weights to normalise if that is asked for."""
    for _, choice, field in chosen(algorithm):
        floor, cap = choice.options.get("floor"), choice.options.get("cap")
        if isinstance(floor, int | float) and isinstance(cap, int | float) and floor > cap:
            yield wrong_value(f"{field}.options.floor", floor, f"is above the cap, {cap:g}", "make it at most the cap.")
    if algorithm.normalize_correction_weights and not any(
        e.gives_weights for _, e in entries[AlgorithmKind.CORRECTION]
    ):
        reason = "there is no correction that gives weights"
        fix = "choose one, for example `correction: tis_token`, or leave it out."
        yield wrong_value("algorithm.normalize_correction_weights", True, reason, fix)


def _cut_distribution(spec: JobSpec, entries: Entries) -> Iterator[Mistake]:
    """The engine's log-probabilities are compared with the trainer's only if both are over all tokens."""
    rollout, algorithm = spec.rollout, spec.algorithm
    compared = {
        "leave algorithm.correction out": bool(algorithm.corrections),
        "leave algorithm.off_policy_limit out": algorithm.off_policy_limit is not None,
        "set algorithm.old_logprobs to recompute": algorithm.old_logprobs == "rollout",
        "choose the policy loss ppo": any(BEHAVIOUR in loss.inputs for _, loss in entries[AlgorithmKind.POLICY_LOSS]),
    }
    if not any(compared.values()):
        return
    instead = " and ".join(fix for fix, is_compared in compared.items() if is_compared)
    reason = "the engine's log-probabilities are over the tokens that it keeps, the trainer's over all tokens"
    for field, value, whole in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != whole:
            yield wrong_value(f"rollout.{field}", value, reason, f"set it to {whole:g}, or {instead}.")


def _unknown(field: str, value: str, known: tuple[str, ...]) -> Mistake:
    return wrong_value(field, value, "is not one of the known values", choose(value, known))
