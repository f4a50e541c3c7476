"""Where a prompt of a job can stand and every move between, as data. Pure: the store runs the same table in Redis.

issued = queued + leased + generated + trained + dropped, after every move.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from millrace.errors import InvalidState


class PromptState(StrEnum):
    QUEUED = "queued"
    """In the queue, leased by nobody."""
    LEASED = "leased"
    """A replica works on it, under a deadline."""
    GENERATED = "generated"
    """Its group is complete and waits to be trained."""
    TRAINED = "trained"
    DROPPED = "dropped"
    """Given up with a reason."""


class Move(StrEnum):
    ISSUE = "issue"
    LEASE = "lease"
    GIVE_BACK = "give_back"
    """The lease expired, was released, or its holder died or lost its weights."""
    COMPLETE = "complete"
    REFUSE = "refuse"
    """The replica answers that there will be no group: the prompt is too long, its reward failed."""
    TRAIN = "train"
    DROP = "drop"
    """The coordinator gives the prompt up: without signal, its job has ended."""
    REGENERATE = "regenerate"
    """The group came too late to be trained; its prompt is issued again."""
    REWIND = "rewind"
    """The trainer went back to a checkpoint: what came after it has to be generated again."""


@dataclass(frozen=True)
class Rule:
    """A move is allowed from `before` (None: not issued yet) and leads to `after`."""

    before: frozenset[PromptState | None]
    after: PromptState


def _rule(after: PromptState, *before: PromptState | None) -> Rule:
    return Rule(frozenset(before), after)


MOVES: Mapping[Move, Rule] = {
    Move.ISSUE: _rule(PromptState.QUEUED, None),
    Move.LEASE: _rule(PromptState.LEASED, PromptState.QUEUED),
    Move.GIVE_BACK: _rule(PromptState.QUEUED, PromptState.LEASED),
    Move.COMPLETE: _rule(PromptState.GENERATED, PromptState.LEASED),
    Move.REFUSE: _rule(PromptState.DROPPED, PromptState.LEASED),
    Move.TRAIN: _rule(PromptState.TRAINED, PromptState.GENERATED),
    Move.DROP: _rule(PromptState.DROPPED, PromptState.GENERATED, PromptState.QUEUED, PromptState.LEASED),
    Move.REGENERATE: _rule(PromptState.QUEUED, PromptState.GENERATED),
    Move.REWIND: _rule(PromptState.QUEUED, PromptState.GENERATED, PromptState.TRAINED, PromptState.DROPPED),
}


def after(state: PromptState | None, move: Move) -> PromptState:
    """The state that `move` leads to. Raises InvalidState where it is not allowed from `state`."""
    rule = MOVES[move]
    if state not in rule.before:
        stands = "was never issued" if state is None else f"is {state}"
        allowed = ", ".join(sorted(s or "not issued" for s in rule.before))
        raise InvalidState(f"a prompt that {stands} cannot {move}.", f"{move} is for prompts that are {allowed}.")
    return rule.after


@dataclass(frozen=True)
class Counts:
    """How many prompts stand where."""

    issued: int = 0
    queued: int = 0
    leased: int = 0
    generated: int = 0
    trained: int = 0
    dropped: int = 0
    waiting: int = 0
    """Of those queued: rewound or to be regenerated, and not yet put into the queue again."""

    @property
    def in_flight(self) -> int:
        """Prompts that replicas may be working on or have worked on, and that no step has trained."""
        return self.queued - self.waiting + self.leased + self.generated

    @property
    def adds_up(self) -> bool:
        return self.issued == self.queued + self.leased + self.generated + self.trained + self.dropped

    def moved(self, state: PromptState | None, move: Move) -> "Counts":
        """The counts after one prompt that stood at `state` made `move`."""
        to = after(state, move)
        changes = {"issued": self.issued + 1} if state is None else {state.value: getattr(self, state) - 1}
        changed = replace(self, **changes)
        return replace(changed, **{to.value: getattr(changed, to) + 1})


def capacity(*, staleness: int, version: int, prompts_per_step: int, trained: int, in_flight: int) -> int:
    """How many prompts may be issued now so that none of them has to be staler than the bound when it is trained."""
    return max(0, (staleness + version + 1) * prompts_per_step - (trained + in_flight))


def lua_table() -> str:
    """`MOVES` as a Lua table: MOVES.lease = {before = {queued = true}, after = 'leased'}."""
    rules = []
    for move, rule in MOVES.items():
        before = ", ".join(f"{state or 'none'} = true" for state in sorted(rule.before, key=str))
        rules.append(f"{move} = {{before = {{{before}}}, after = '{rule.after}'}}")
    return "local MOVES = {" + ", ".join(rules) + "}\n"
