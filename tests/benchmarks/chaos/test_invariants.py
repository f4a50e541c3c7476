"""Each check of chaos finds what it is for: an observation that is right, and the same with one thing wrong."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chaos.invariants import ALWAYS, ENDED, QUIET, Terms, violations
from benchmarks.chaos.job import PROMPTS_PER_STEP, REFUSED, ROWS, SEED
from benchmarks.chaos.observation import Observation
from millrace.data.prompt_source import Order
from services.coordinator.state.ledger import Counts

STEPS = 14
"""Beyond the first pass."""
IN_FLIGHT = {"queued": 2, "leased": 1, "generated": 1}


def sound() -> Observation:
    """A job after STEPS steps, with a few prompts in flight."""
    drawn = [f"{turn}-{row}" for turn in range(3) for row in Order(ROWS, turn, SEED, True)]
    states: dict[str, str] = {}
    settled: dict[str, int] = {}
    waiting = [state for state, number in IN_FLIGHT.items() for _ in range(number)]
    trained = 0
    while waiting:
        prompt = drawn[len(states)]
        if int(prompt.partition("-")[2]) in REFUSED:
            states[prompt], settled[prompt] = "dropped", trained // PROMPTS_PER_STEP + 1
        elif trained < STEPS * PROMPTS_PER_STEP:
            states[prompt], settled[prompt] = "trained", trained // PROMPTS_PER_STEP + 1
            trained += 1
        else:
            states[prompt] = waiting.pop()
    counts = Counts(issued=len(states), **Counter(states.values()))
    reasons = {prompt: "reward_failed" for prompt, state in states.items() if state == "dropped"}
    cut = {"step": 12, "version": 12, "cursor": 60, "path": "/out/step-12"}
    ledger = {"issued": 60, "queued": 2, "leased": 5, "generated": 1, "trained": 48, "dropped": 4, "waiting": 0}
    values = {"training/staleness/min": 0.0, "training/staleness/max": 1.0, "rollout_corr/k3_kl/same_version": 1e-7}
    return Observation(
        jobs=["job-1"],
        record={
            "state": "running",
            "step": str(STEPS),
            "version": str(STEPS),
            "cursor": str(len(states)),
            "checkpoint_step": "12",
        },
        counts=counts,
        states=states,
        settled=settled,
        reasons=reasons,
        reason_counts=dict(Counter(reasons.values())),
        rewinding=False,
        versions={next(p for p, s in states.items() if s == "generated"): (13, 14)},
        rows={step: {**values, "training/rollout_logprobs_diff_max": 0.3} for step in range(1, STEPS + 1)},
        checkpoints={12: cut | {"ledger": ledger}},
        lease_ages_s=[4.0],
    )


def a_prompt(seen: Observation, state: str) -> str:
    return next(prompt for prompt, now in seen.states.items() if now == state)


def with_record(seen: Observation, **fields: str) -> Observation:
    return replace(seen, record={**seen.record, **fields})


def with_metric(seen: Observation, name: str, value: float) -> Observation:
    return replace(seen, rows={**seen.rows, 3: {**seen.rows[3], name: value}})


def without_prompt(seen: Observation) -> Observation:
    lost = a_prompt(seen, "trained")
    return replace(seen, states={p: s for p, s in seen.states.items() if p != lost})


def with_reason(seen: Observation, prompt: str, reason: str) -> Observation:
    reasons = {**seen.reasons, prompt: reason}
    return replace(seen, reasons=reasons, reason_counts=dict(Counter(reasons.values())))


def with_cut(seen: Observation, **fields: Any) -> Observation:
    return replace(seen, checkpoints={12: {**seen.checkpoints[12], **fields}})


WRONG: dict[str, tuple[Callable[[Observation], Observation], str]] = {
    "a count": (lambda o: replace(o, counts=replace(o.counts, leased=o.counts.leased + 1)), "do not add up"),
    "a state": (lambda o: replace(o, states={**o.states, a_prompt(o, "queued"): "leased"}), "are counted as leased"),
    "a prompt lost": (without_prompt, "drawn are not in the ledger"),
    "a prompt of nowhere": (lambda o: replace(o, states={**o.states, "9-1": "queued"}), "that were not drawn"),
    "trained in another step": (
        lambda o: replace(o, settled={**o.settled, a_prompt(o, "trained"): 2}),
        "numbers of prompts trained by step",
    ),
    "a step without metrics": (lambda o: replace(o, rows={s: r for s, r in o.rows.items() if s != 5}), "metrics of"),
    "another version": (lambda o: with_record(o, version="13"), "version 13 at step 14"),
    "no reason": (lambda o: replace(o, reasons={}), "dropped without a reason"),
    "an odd reason": (lambda o: with_reason(o, a_prompt(o, "dropped"), "replica_failed"), "dropped as replica_failed"),
    "a cut of another step": (lambda o: with_cut(o, version=11), "is of another cut"),
    "a cut that does not add up": (lambda o: with_cut(o, cursor=61), "does not add up"),
    "a checkpoint ahead": (lambda o: with_record(o, checkpoint_step="15"), "is ahead of step"),
    "too stale": (lambda o: with_metric(o, "training/staleness/max", 2.0), "step 3 has a staleness of 2"),
    "of the future": (lambda o: with_metric(o, "training/staleness/min", -1.0), "versions of the future"),
    "a group of the future": (lambda o: replace(o, versions={"0-1": (15,)}), "groups of the versions"),
    "mixed weights": (lambda o: with_metric(o, "rollout_corr/k3_kl/same_version", 0.02), "differ by a KL of 0.02"),
    "weights not finite": (lambda o: with_metric(o, "rollout_corr/k3_kl/same_version", float("nan")), "a KL of nan"),
    "a failure": (lambda o: with_record(o, failure="something"), "the job failed: something"),
    "a second job": (lambda o: replace(o, jobs=["job-1", "job-2"]), "there are 2 jobs"),
    "a lease without an end": (lambda o: replace(o, lease_ages_s=[60.0]), "60 s old"),
}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert violations(sound(), Terms(max_staleness=1), {**ALWAYS, **QUIET}) == []


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str) -> None:
    change, told = WRONG[what]
    found = violations(change(sound()), Terms(max_staleness=1), {**ALWAYS, **QUIET})
    assert any(told in each for each in found), found


def test_on_policy_every_token_agrees() -> None:
    exact = with_metric(sound(), "training/staleness/max", 0.0)
    assert any("nats on a token" in each for each in violations(exact, Terms(max_staleness=0)))


def test_a_fault_of_a_scorer_costs_at_most_its_group() -> None:
    seen = sound()
    other = a_prompt(seen, "queued")
    lost = with_reason(replace(seen, states={**seen.states, other: "dropped"}), other, "reward_failed")
    lost = replace(lost, counts=replace(seen.counts, queued=seen.counts.queued - 1, dropped=seen.counts.dropped + 1))
    assert violations(lost, Terms(max_staleness=1, lost_groups=1)) == []
    assert any("cost the groups of" in each for each in violations(lost, Terms(max_staleness=1)))


def test_in_the_end_nothing_is_in_flight() -> None:
    assert any("neither trained nor dropped" in each for each in violations(sound(), Terms(1), ENDED))
