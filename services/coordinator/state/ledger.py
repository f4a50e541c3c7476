"""The states of a job's prompts and every move between them, as data. The store runs the same table in Redis.

issued = queued + leased + generated + trained + dropped, after every move.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from millrace.errors import InvalidState


class PromptState(StrEnum):
    QUEUED = "queued"
    """The prompt is in the queue, or waiting to be put there; leased by nobody."""
    LEASED = "leased"
    """A replica works on it, until a deadline."""
    GENERATED = "generated"
    """The prompt's group is complete and waits to be trained."""
    TRAINED = "trained"
    """A step was trained on its group."""
    DROPPED = "dropped"
    """Given up, with a DropReason."""


class Move(StrEnum):
    """What changes the state of a prompt."""

    ISSUE = "issue"
    """The coordinator puts the prompt into the queue."""
    LEASE = "lease"
    """A replica claims it."""
    GIVE_BACK = "give_back"
    """The lease expired, was released, or its holder died or lost its weights."""
    COMPLETE = "complete"
    """The replica answers with the group."""
    REFUSE = "refuse"
    """The replica answers that there is no group: the prompt is too long, its reward failed."""
    TRAIN = "train"
    """A step was trained on the group."""
    DROP = "drop"
    """The coordinator gives the prompt up: its group has no signal, or its job has ended."""
    REGENERATE = "regenerate"
    """The group is too stale to be trained; its prompt is generated again."""
    REWIND = "rewind"
    """The trainer went back to an earlier version: what came after it is generated again."""


@dataclass(frozen=True)
class Rule:
    """A move is allowed from the states `before` (None: not issued yet) and leads to `after`."""

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
    """The state that `move` leads to. Raises InvalidState if it is not allowed from `state`."""
    rule = MOVES[move]
    if state not in rule.before:
        condition = "was never issued" if state is None else f"is {state}"
        allowed = ", ".join(sorted(s or "not issued" for s in rule.before))
        raise InvalidState(f"a prompt that {condition} cannot {move}.", f"{move} is for prompts that are {allowed}.")
    return rule.after


@dataclass(frozen=True)
class Counts:
    """Number of prompts in each state."""

    issued: int = 0
    queued: int = 0
    leased: int = 0
    generated: int = 0
    trained: int = 0
    dropped: int = 0
    waiting: int = 0
    """The prompts of `queued` that are not in the queue yet: rewound, or to be regenerated."""

    @property
    def in_flight(self) -> int:
        """Prompts that are in the queue, leased or generated."""
        return self.queued - self.waiting + self.leased + self.generated

    @property
    def adds_up(self) -> bool:
        return self.issued == self.queued + self.leased + self.generated + self.trained + self.dropped

    def moved(self, state: PromptState | None, move: Move) -> "Counts":
        """The counts after `move` of one prompt that was in `state`. Raises InvalidState if it is not allowed."""
        to = after(state, move)
        changes = {"issued": self.issued + 1} if state is None else {state.value: getattr(self, state) - 1}
        changed = replace(self, **changes)
        return replace(changed, **{to.value: getattr(changed, to) + 1})


def capacity(
    *, staleness: int, version: int, prompts_per_step: int, trained: int, in_flight: int, carried: int = 0
) -> int:
    """How many prompts can be issued now without any of them exceeding the staleness bound when it is trained, and
    `carried` more."""
    return max(0, (staleness + version + 1) * prompts_per_step + carried - (trained + in_flight))


def lua_table() -> str:
    """`MOVES` as a Lua table: MOVES.lease = {before = {queued = true}, after = 'leased'}."""
    rules = []
    for move, rule in MOVES.items():
        before = ", ".join(f"{state or 'none'} = true" for state in sorted(rule.before, key=str))
        rules.append(f"{move} = {{before = {{{before}}}, after = '{rule.after}'}}")
    return "local MOVES = {" + ", ".join(rules) + "}\n"
