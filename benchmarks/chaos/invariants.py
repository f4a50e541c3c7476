"""The lines of "What always holds" in ARCHITECTURE.md as checks of what Redis holds. Pure.

Each check answers what contradicts its line, in words; nothing where it holds.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.chaos.job import LEASE_S, PROMPTS_PER_STEP, REFUSED, ROWS, SEED
from benchmarks.chaos.observation import Observation
from millrace.data.prompt_source import Order
from millrace.drops import DropReason
from millrace.ids import row_of, training_prompt

LARGEST_DIFFERENCE = 1e-2
"""Nats between engine and trainer of one token, in float32 and from the same weights."""
LARGEST_K3_KL = 1e-3
LEASE_MARGIN_S = 10.0


@dataclass(frozen=True)
class Terms:
    """What the checks have to know besides Redis."""

    max_staleness: int
    lost_groups: int = 0
    """Largest number of groups that faults may have cost, because they hit the processes that scored them."""
    rows: int = ROWS
    """Rows of the job's data."""
    seed: int = SEED
    """Seed of the order of the rows."""
    refused: frozenset[int] = REFUSED
    """Rows that cannot be scored."""
    prompts_per_step: int = PROMPTS_PER_STEP
    lease_s: float = LEASE_S


Check = Callable[[Observation, Terms], Iterator[str]]


def ledger_adds_up(seen: Observation, _: Terms) -> Iterator[str]:
    """The counters agree with each other and with the states of the prompts."""
    counts = seen.counts
    if not counts.adds_up:
        yield f"the counts do not add up: {counts}"
    if seen.states and counts.issued != len(seen.states):
        yield f"{counts.issued} prompts are counted as issued and {len(seen.states)} have a state"
    for state, number in seen.by_state.items():
        if getattr(counts, state) != number:
            yield f"{getattr(counts, state)} prompts are counted as {state} and {number} are"


def nothing_is_skipped(seen: Observation, terms: Terms) -> Iterator[str]:
    """The prompts of the ledger are those that the data's order gives up to the cursor, each once."""
    cursor = int(seen.record["cursor"])
    passes = range(cursor // terms.rows + 1)
    drawn = {training_prompt(turn, row) for turn in passes for row in _pass(turn, cursor, terms)}
    if missing := drawn - seen.states.keys():
        yield f"prompts that were drawn are not in the ledger: {sorted(missing)[:5]}"
    if unknown := seen.states.keys() - drawn:
        yield f"prompts are in the ledger that were not drawn: {sorted(unknown)[:5]}"


def _pass(turn: int, cursor: int, terms: Terms) -> list[int]:
    return list(Order(terms.rows, turn, terms.seed, True)[: max(0, cursor - turn * terms.rows)])


def trained_once(seen: Observation, terms: Terms) -> Iterator[str]:
    """Every step was trained on its own prompts, and has its metrics."""
    if seen.rewinding:
        return
    per_step = Counter(seen.settled.get(prompt, -1) for prompt in seen.trained())
    wanted = {step: terms.prompts_per_step for step in range(1, seen.step + 1)}
    if dict(per_step) != wanted:
        wrong = {s: per_step.get(s, 0) for s in per_step.keys() | wanted if per_step.get(s, 0) != wanted.get(s, 0)}
        yield f"at step {seen.step}: numbers of prompts trained by step that are not {terms.prompts_per_step}: {wrong}"
    rows = sorted(step for step in seen.rows if step > 0)
    if rows != list(range(1, seen.step + 1)):
        yield f"at step {seen.step} there are metrics of the steps {rows}"
    if seen.record["version"] != seen.record["step"]:
        yield f"version {seen.record['version']} at step {seen.step}"


def drops_have_reasons(seen: Observation, terms: Terms) -> Iterator[str]:
    """Only rows that cannot be scored are dropped while the job runs, each with its reason; and what a fault of the
    scorer cost."""
    if seen.rewinding:
        return
    dropped = {prompt for prompt, state in seen.states.items() if state == "dropped"}
    if dropped != seen.reasons.keys():
        yield f"dropped without a reason, or with one and not dropped: {sorted(dropped ^ seen.reasons.keys())[:5]}"
    if Counter(seen.reasons.values()) != seen.reason_counts:
        yield f"reasons {Counter(seen.reasons.values())} are counted as {seen.reason_counts}"
    ended = seen.record["state"] in ("cancelled", "succeeded", "failed")
    allowed = {DropReason.REWARD_FAILED, *([DropReason.JOB_CANCELLED] if ended else [])}
    if other := {reason for reason in seen.reasons.values() if reason not in allowed}:
        yield f"prompts were dropped as {', '.join(sorted(other))}"
    failed = [prompt for prompt, reason in seen.reasons.items() if reason == DropReason.REWARD_FAILED]
    if len(lost := [prompt for prompt in failed if row_of(prompt) not in terms.refused]) > terms.lost_groups:
        yield f"{terms.lost_groups} faults of scorers cost the groups of {sorted(lost)}"
    if odd := [prompt for prompt in seen.trained() if row_of(prompt) in terms.refused]:
        yield f"prompts were trained that cannot be scored: {odd[:5]}"


def within_staleness(seen: Observation, terms: Terms) -> Iterator[str]:
    """No group was trained beyond the bound, and no complete group is of a version that is not there yet."""
    for step, values in seen.rows.items():
        if step and not 0 <= values["training/staleness/min"] <= values["training/staleness/max"]:
            yield f"step {step} was trained on versions of the future"
        if step and values["training/staleness/max"] > terms.max_staleness:
            yield f"step {step} has a staleness of {values['training/staleness/max']:g}"
    version = int(seen.record["version"])
    if odd := {prompt: of for prompt, of in seen.versions.items() if not 0 <= min(of) <= max(of) <= version}:
        yield f"at version {version} there are groups of the versions {odd}"


def tokens_carry_their_version(seen: Observation, terms: Terms) -> Iterator[str]:
    """The trainer's probabilities of a version are those of the engine, so the tokens are of the version they name."""
    for step, values in seen.rows.items():
        apart = values.get("training/rollout_logprobs_diff_max", 0.0)
        if terms.max_staleness == 0 and not apart < LARGEST_DIFFERENCE:
            yield f"step {step}: engine and trainer differ by {apart:.3g} nats on a token of the same version"
        same = values.get("rollout_corr/k3_kl/same_version", 0.0)
        if not same < LARGEST_K3_KL:
            yield f"step {step}: engine and trainer differ by a KL of {same:.3g} on tokens of the same version"


def job_goes_on(seen: Observation, _: Terms) -> Iterator[str]:
    """No fault ends the job, and a refused submission leaves nothing behind."""
    if failure := seen.record.get("failure"):
        yield f"the job failed: {failure}"
    if len(seen.jobs) != 1:
        yield f"there are {len(seen.jobs)} jobs"


def checkpoints_are_cuts(seen: Observation, terms: Terms) -> Iterator[str]:
    """The ledger of each checkpoint is that of its step, and the newest checkpoint is not ahead of the job."""
    for step, cut in seen.checkpoints.items():
        ledger = cut["ledger"]
        total = sum(ledger[state] for state in ("queued", "leased", "generated", "trained", "dropped"))
        if not (cut["step"] == cut["version"] == step and ledger["trained"] == step * terms.prompts_per_step):
            yield f"the checkpoint of step {step} is of another cut: {cut}"
        if not ledger["issued"] == total == cut["cursor"]:
            yield f"the ledger in the checkpoint of step {step} does not add up: {cut}"
    if int(seen.record.get("checkpoint_step", -1)) > seen.step:
        yield f"the checkpoint of step {seen.record['checkpoint_step']} is ahead of step {seen.step}"


ALWAYS: Mapping[str, tuple[Check, ...]] = {
    "1 trained once or dropped, the ledger adds up": (
        ledger_adds_up,
        nothing_is_skipped,
        trained_once,
        drops_have_reasons,
        checkpoints_are_cuts,
    ),
    "2 staleness bound, versions of tokens": (within_staleness, tokens_carry_their_version),
    "3 the job goes on from what is in Redis": (job_goes_on,),
}
"""Line of "What always holds" → its checks. They hold at every moment."""


def leases_end(seen: Observation, terms: Terms) -> Iterator[str]:
    """No lease is older than it may be. Holds a while after the last fault."""
    if late := [age for age in seen.lease_ages_s if age > terms.lease_s + LEASE_MARGIN_S]:
        yield f"leases of {terms.lease_s:g} s are {max(late):.0f} s old"


def all_are_settled(seen: Observation, _: Terms) -> Iterator[str]:
    """Once the job has ended, each prompt is trained or dropped."""
    if open_ := [prompt for prompt, state in seen.states.items() if state not in ("trained", "dropped")]:
        yield f"prompts are neither trained nor dropped: {sorted(open_)[:5]}"


QUIET: Mapping[str, tuple[Check, ...]] = {"4 every deadline ends": (leases_end,)}
"""The same for a job that is paused some time after the last fault."""
ENDED: Mapping[str, tuple[Check, ...]] = {"1 trained or dropped in the end": (all_are_settled,)}
"""The same for a job that was cancelled."""


def violations(seen: Observation, terms: Terms, checks: Mapping[str, tuple[Check, ...]] = ALWAYS) -> list[str]:
    """What contradicts the lines, each with its line."""
    return [f"{line}: {problem}" for line, each in checks.items() for check in each for problem in check(seen, terms)]
