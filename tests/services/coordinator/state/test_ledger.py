"""The ledger's table, state by state and move by move."""

import itertools

import pytest

from millrace.errors import InvalidState
from services.coordinator.state.ledger import MOVES, Counts, Move, PromptState, after, capacity

STATES = [None, *PromptState]
ALLOWED = {
    (None, Move.ISSUE): PromptState.QUEUED,
    (PromptState.QUEUED, Move.LEASE): PromptState.LEASED,
    (PromptState.QUEUED, Move.DROP): PromptState.DROPPED,
    (PromptState.LEASED, Move.GIVE_BACK): PromptState.QUEUED,
    (PromptState.LEASED, Move.COMPLETE): PromptState.GENERATED,
    (PromptState.LEASED, Move.REFUSE): PromptState.DROPPED,
    (PromptState.LEASED, Move.DROP): PromptState.DROPPED,
    (PromptState.GENERATED, Move.TRAIN): PromptState.TRAINED,
    (PromptState.GENERATED, Move.DROP): PromptState.DROPPED,
    (PromptState.GENERATED, Move.REGENERATE): PromptState.QUEUED,
    (PromptState.GENERATED, Move.REWIND): PromptState.QUEUED,
    (PromptState.TRAINED, Move.REWIND): PromptState.QUEUED,
    (PromptState.DROPPED, Move.REWIND): PromptState.QUEUED,
}


@pytest.mark.parametrize(("state", "move"), list(itertools.product(STATES, Move)))
def test_every_state_and_move(state: PromptState | None, move: Move) -> None:
    if (state, move) in ALLOWED:
        assert after(state, move) is ALLOWED[state, move]
        return
    with pytest.raises(InvalidState, match=move.value):
        after(state, move)


def test_every_move_has_a_rule_and_every_state_is_reached() -> None:
    assert set(MOVES) == set(Move)
    assert {rule.after for rule in MOVES.values()} == set(PromptState)


def test_trained_and_dropped_are_left_only_by_a_rewind() -> None:
    for state in (PromptState.TRAINED, PromptState.DROPPED):
        assert [move for move, rule in MOVES.items() if state in rule.before] == [Move.REWIND]


def test_counts_add_up_along_every_path_of_five_moves() -> None:
    reached: list[tuple[PromptState | None, Counts]] = [(None, Counts())]
    for _ in range(5):
        following = []
        for state, counts in reached:
            for move, rule in MOVES.items():
                if state in rule.before:
                    following.append((after(state, move), counts.moved(state, move)))
        reached = following
        assert reached and all(counts.adds_up and counts.issued == 1 for _, counts in reached)
        assert all(getattr(counts, state) == 1 for state, counts in reached if state)


@pytest.mark.parametrize(
    ("staleness", "version", "trained", "in_flight", "room"),
    [
        (0, 0, 0, 0, 8),
        (0, 0, 0, 3, 5),
        (0, 2, 16, 8, 0),
        (1, 0, 0, 0, 16),
        (1, 3, 24, 8, 8),
        (2, 3, 24, 30, 0),
    ],
)
def test_capacity(staleness: int, version: int, trained: int, in_flight: int, room: int) -> None:
    found = capacity(staleness=staleness, version=version, prompts_per_step=8, trained=trained, in_flight=in_flight)
    assert found == room
    more = capacity(
        staleness=staleness, version=version, prompts_per_step=8, trained=trained, in_flight=in_flight, carried=5
    )
    assert more == max(0, (staleness + version + 1) * 8 - trained - in_flight + 5)
