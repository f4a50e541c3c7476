"""The algorithm that a job chose: that its functions exist, that their options make sense, and that what they read can
be had in this job. Reads a user's own files; needs no torch."""

from collections.abc import Iterator

from millrace.elsewhere import meant
from millrace.errors import InvalidJob, refused
from millrace.rl.catalogue import AGGREGATIONS, KL_ESTIMATORS, Entry, Kind, find
from millrace.spec.algorithm import Algorithm, Choice
from millrace.spec.job import JobSpec


def check(spec: JobSpec) -> None:
    """Raises InvalidJob with every mistake."""
    if mistakes := [str(mistake) for mistake in mistakes_of(spec)]:
        raise InvalidJob("\n".join(mistakes))


def needs_greedy_baseline(spec: JobSpec) -> bool:
    """Whether its advantage compares with a greedy answer to each prompt."""
    return "greedy_rewards_b" in find(Kind.ADVANTAGE, spec.algorithm.advantage.name).inputs


def mistakes_of(spec: JobSpec) -> Iterator[InvalidJob]:
    """Each mistake with its field, reason and mend."""
    algorithm = spec.algorithm
    if algorithm.aggregation not in AGGREGATIONS:
        yield _unknown("algorithm.aggregation", algorithm.aggregation, AGGREGATIONS)
    if algorithm.kl is not None and algorithm.kl.name not in KL_ESTIMATORS:
        yield _unknown("algorithm.kl.name", algorithm.kl.name, KL_ESTIMATORS)
    if algorithm.kl is not None and algorithm.kl.options:
        yield refused("algorithm.kl.options", algorithm.kl.options, "a KL estimate has none", "remove them.")
    for kind, choice, field in _choices(algorithm):
        try:
            entry = find(kind, choice.name, f"{field}.name")
            entry.check(choice.options, f"{field}.options")
        except InvalidJob as error:
            yield error
            continue
        if kind is Kind.ADVANTAGE:
            yield from _advantage(spec, entry)


def _choices(algorithm: Algorithm) -> Iterator[tuple[Kind, Choice, str]]:
    yield Kind.ADVANTAGE, algorithm.advantage, "algorithm.advantage"
    yield Kind.POLICY_LOSS, algorithm.policy_loss, "algorithm.policy_loss"
    if algorithm.correction is not None:
        yield Kind.CORRECTION, algorithm.correction, "algorithm.correction"


def _advantage(spec: JobSpec, entry: Entry) -> Iterator[InvalidJob]:
    """That its inputs can be had, and that nothing is computed which it does not read."""
    field = "algorithm.advantage.name"
    if entry.needs_critic and spec.algorithm.critic is None:
        mend = "add one, `critic: {}`, or choose an advantage without, for example grpo."
        yield refused(field, entry.name, "it needs a critic, and algorithm.critic is not given", mend)
    if (critic := spec.algorithm.critic) is not None and "values_bt" not in entry.inputs:
        given = critic.model_dump(mode="json", exclude_defaults=True)
        reason = f"the advantage {entry.name!r} reads no values"
        yield refused("algorithm.critic", given, reason, "leave it out, or choose gae.")
    yield from _group_size(spec, entry)
    yield from _separate_rewards(spec, entry)


def _group_size(spec: JobSpec, entry: Entry) -> Iterator[InvalidJob]:
    """That not every advantage comes out as 0. What a user's own makes of small groups is not known."""
    options = entry.defaults | spec.algorithm.advantage.options
    if ":" in entry.name or "group_b" not in entry.required_inputs or options.get("singleton") == "reward":
        return
    least, size = max(2, options.get("k", 0)), spec.rollout.samples_per_prompt
    if size < least:
        reason = f"the advantage {entry.name!r} compares the answers to a prompt, and is 0 with fewer than {least}"
        mend = f"raise it to at least {least}, or choose an advantage that compares none, for example remax."
        yield refused("rollout.samples_per_prompt", size, reason, mend)


def _separate_rewards(spec: JobSpec, entry: Entry) -> Iterator[InvalidJob]:
    parts, algorithm = spec.reward.parts, spec.algorithm
    reads_parts = "rewards_bk" in entry.inputs
    if "rewards_bk" in entry.required_inputs and not parts:
        mend = "name them in reward.parts: numbers that the reward function returns beside its score."
        yield refused("algorithm.advantage.name", entry.name, "it needs several rewards of each answer", mend)
    if parts and not reads_parts:
        yield refused("reward.parts", parts, f"the advantage {entry.name!r} reads one reward", "leave it out.")
    weights = algorithm.advantage.options.get("weights")
    if reads_parts and isinstance(weights, list | tuple) and parts and len(weights) != len(parts):
        reason = f"reward.parts names {len(parts)} rewards"
        yield refused("algorithm.advantage.options.weights", weights, reason, "give one weight a reward.")
    if "token_rewards_bt" in entry.inputs:
        return
    ignored = f"the advantage {entry.name!r} reads the separate rewards only"
    if algorithm.overlong_buffer_tokens:
        mend = "make the penalty one of reward.parts, or leave it out."
        yield refused("algorithm.overlong_buffer_tokens", algorithm.overlong_buffer_tokens, ignored, mend)
    if algorithm.kl is not None and algorithm.kl_in == "reward":
        yield refused("algorithm.kl_in", "reward", ignored, "put it into the loss.")


def _unknown(field: str, value: str, known: tuple[str, ...]) -> InvalidJob:
    near = meant(value, known)
    mend = f"did you mean {near}? Choose one of" if near else "choose one of"
    return refused(field, value, "there is none of that name", f"{mend} {', '.join(known)}.")
