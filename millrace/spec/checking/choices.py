"""The algorithm that a job chose: that its functions exist, that their options make sense, and that what they read can
be had in this job. Reads a user's own files; needs no torch."""

from collections.abc import Iterator, Mapping

from millrace.errors import InvalidJob, refused
from millrace.rl.registry.catalogue import AGGREGATIONS, KL_ESTIMATORS, Entry, Kind, find
from millrace.spec.algorithm import Algorithm, Choice
from millrace.spec.job import JobSpec
from millrace.validation.foreign_names import meant

BEHAVIOUR = "behaviour_logprobs_bt"
"""Of a policy loss: the engine's log-probabilities."""


def check(spec: JobSpec) -> None:
    """Raises InvalidJob with every mistake."""
    if mistakes := [str(mistake) for mistake in mistakes_of(spec)]:
        raise InvalidJob("\n".join(mistakes))


def needs_greedy_baseline(spec: JobSpec) -> bool:
    """Whether its advantage compares with a greedy answer to each prompt."""
    return "greedy_rewards_b" in find(Kind.ADVANTAGE, spec.algorithm.advantage.name).inputs


def mistakes_of(spec: JobSpec) -> Iterator[InvalidJob]:
    """Each mistake with its field, reason and fix."""
    algorithm = spec.algorithm
    if algorithm.aggregation not in AGGREGATIONS:
        yield _unknown("algorithm.aggregation", algorithm.aggregation, AGGREGATIONS)
    if algorithm.kl is not None and algorithm.kl.name not in KL_ESTIMATORS:
        yield _unknown("algorithm.kl.name", algorithm.kl.name, KL_ESTIMATORS)
    if algorithm.kl is not None and algorithm.kl.options:
        yield refused("algorithm.kl.options", algorithm.kl.options, "a KL estimate has none", "remove them.")
    entries: dict[Kind, Entry] = {}
    for kind, choice, field in chosen(algorithm):
        try:
            entry = find(kind, choice.name, f"{field}.name")
            entry.check(choice.options, f"{field}.options")
        except InvalidJob as error:
            yield error
            continue
        entries[kind] = entry
    if Kind.ADVANTAGE in entries:
        yield from _advantage(spec, entries[Kind.ADVANTAGE])
    yield from _weighted_once(algorithm, entries)
    yield from _cut_distribution(spec, entries)


def chosen(algorithm: Algorithm) -> Iterator[tuple[Kind, Choice, str]]:
    """The functions that a job names: of which kind, and in which field."""
    yield Kind.ADVANTAGE, algorithm.advantage, "algorithm.advantage"
    yield Kind.POLICY_LOSS, algorithm.policy_loss, "algorithm.policy_loss"
    if algorithm.correction is not None:
        yield Kind.CORRECTION, algorithm.correction, "algorithm.correction"


def _advantage(spec: JobSpec, entry: Entry) -> Iterator[InvalidJob]:
    """That its inputs can be had, and that nothing is computed which it does not read."""
    field = "algorithm.advantage.name"
    if entry.needs_critic and spec.algorithm.critic is None:
        fix = "add one, `critic: {}`, or choose an advantage without, for example grpo."
        yield refused(field, entry.name, "it needs a critic, and algorithm.critic is not given", fix)
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
        fix = f"raise it to at least {least}, or choose an advantage that compares none, for example remax."
        yield refused("rollout.samples_per_prompt", size, reason, fix)


def _separate_rewards(spec: JobSpec, entry: Entry) -> Iterator[InvalidJob]:
    parts, algorithm = spec.reward.parts, spec.algorithm
    reads_parts = "rewards_bk" in entry.inputs
    if "rewards_bk" in entry.required_inputs and not parts:
        fix = "name them in reward.parts: numbers that the reward function returns beside its score."
        yield refused("algorithm.advantage.name", entry.name, "it needs several rewards of each answer", fix)
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
        fix = "make the penalty one of reward.parts, or leave it out."
        yield refused("algorithm.overlong_buffer_tokens", algorithm.overlong_buffer_tokens, ignored, fix)
    if algorithm.kl is not None and algorithm.kl_in == "reward":
        yield refused("algorithm.kl_in", "reward", ignored, "put it into the loss.")


def _weighted_once(algorithm: Algorithm, entries: Mapping[Kind, Entry]) -> Iterator[InvalidJob]:
    """That no token is weighted for the engine's policy twice. What a user's own correction gives is not known."""
    correction, loss = entries.get(Kind.CORRECTION), entries.get(Kind.POLICY_LOSS)
    if correction is None or loss is None or ":" in correction.name or correction.name.startswith("reject_"):
        return
    field, fix = "algorithm.correction.name", "leave the correction out, choose one that rejects, for example"
    if algorithm.old_logprobs == "rollout" and "old_logprobs_bt" in loss.inputs:
        reason = "with algorithm.old_logprobs of rollout the loss's ratio is this weight already, it would count twice"
        yield refused(field, correction.name, reason, f"{fix} reject_token, or set old_logprobs to recompute.")
    if BEHAVIOUR in loss.inputs:
        reason = f"the policy loss {loss.name!r} weighs by the engine's log-probabilities itself, it would count twice"
        yield refused(field, correction.name, reason, f"{fix} reject_token, or choose the loss ppo.")


def _cut_distribution(spec: JobSpec, entries: Mapping[Kind, Entry]) -> Iterator[InvalidJob]:
    """That the engine's log-probabilities are compared with the trainer's only where both are of all tokens."""
    rollout, algorithm = spec.rollout, spec.algorithm
    loss = entries.get(Kind.POLICY_LOSS)
    compared = {
        "leave algorithm.correction out": algorithm.correction is not None,
        "set algorithm.old_logprobs to recompute": algorithm.old_logprobs == "rollout",
        "choose the policy loss ppo": loss is not None and BEHAVIOUR in loss.inputs,
    }
    if not any(compared.values()):
        return
    instead = " and ".join(fix for fix, is_compared in compared.items() if is_compared)
    reason = "the engine's log-probabilities are of the tokens that it leaves, the trainer's of all, and are compared"
    for field, value, whole in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != whole:
            yield refused(f"rollout.{field}", value, reason, f"set it to {whole:g}, or {instead}.")


def _unknown(field: str, value: str, known: tuple[str, ...]) -> InvalidJob:
    near = meant(value, known)
    fix = f"did you mean {near}? Choose one of" if near else "choose one of"
    return refused(field, value, "there is none of that name", f"{fix} {', '.join(known)}.")
