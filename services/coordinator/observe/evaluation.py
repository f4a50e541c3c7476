"""Metrics of the answers to held-out prompts, under verl's names."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import comb

import numpy as np
import numpy.typing as npt

from services.coordinator.observe.step_metrics import mean
from services.coordinator.state.group import GroupSummary

DRAWS = 1000
SEED = 42
"""Number of draws and seed of the bootstrap, as in verl."""
Indices = npt.NDArray[np.int64]


def held_out(source: str, groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Metrics of one evaluation of the data source `source`, whose answers are in `groups`.

    They are of the reward, and of `acc` if the reward function gave every answer one; `val-core` has the latter
    then. With n answers to a prompt: their mean and standard deviation, and for k = 2, 4, ... and n the expected best
    and worst among k different answers; for values of 0 and 1 the best is pass@k (arXiv 2107.03374). verl draws the k
    answers with replacement instead. Where every answer has a `pred`, also the value of the majority of k answers.
    """
    values = _variables(groups)
    votes = [group.votes for group in groups if group.votes is not None]
    majorities = Majorities(votes) if len(votes) == len(groups) else None
    found: dict[str, float] = {}
    for variable, rows in values.items():
        most = max(map(len, rows))
        for name, value, is_main in _statistics(rows, most, majorities):
            section = "val-core" if is_main and variable == list(values)[-1] else "val-aux"
            found[f"{section}/{source}/{variable}/{name}"] = value
    return found


def main_values(groups: Sequence[GroupSummary]) -> list[float]:
    """The variable of `val-core` of every answer to the prompts of one data source."""
    return [value for row in list(_variables(groups).values())[-1] for value in row]


def _variables(groups: Sequence[GroupSummary]) -> dict[str, list[list[float]]]:
    """The values of each variable, a row for each prompt. The last variable is that of `val-core`."""
    values = {"reward": [group.rewards for group in groups]}
    accuracies = [group.accuracies for group in groups if group.accuracies is not None]
    if len(accuracies) == len(groups):
        values["acc"] = accuracies
    return values


def sizes(most: int) -> list[int]:
    """The numbers of answers that best, worst and majority are computed for, of `most` answers: 2, 4, ... and all."""
    return sorted({most, *(2**i for i in range(1, most.bit_length()))} - {1})


def _statistics(
    rows: Sequence[Sequence[float]], most: int, majorities: "Majorities | None"
) -> Iterator[tuple[str, float, bool]]:
    """Each metric of one variable, whose values are in `rows`, a row a prompt: its name, its value, and whether it is
    one of the main metrics of a variable."""
    yield f"mean@{most}", mean([value for row in rows for value in row]), True
    if most > 1:
        yield f"std@{most}", mean([float(np.std(row)) for row in rows]), False
    for k in sizes(most):
        enough = [sorted(row) for row in rows if len(row) >= k]
        yield f"best@{k}/mean", mean([_expected_last(row, k) for row in enough]), k == most
        lowest = mean([_expected_last([-value for value in reversed(row)], k) for row in enough])
        yield f"worst@{k}/mean", -lowest, False
        if majorities is not None:
            winners = zip(rows, majorities.of(k), strict=True)
            drawn = [np.array(row)[chosen] for row, chosen in winners if len(row) >= k]
            yield f"maj@{k}/mean", mean([float(values.mean()) for values in drawn]), k == most
            yield f"maj@{k}/std", mean([float(values.std()) for values in drawn]), k == most


def _expected_last(ascending: Sequence[float], k: int) -> float:
    """Expected largest of k different values drawn from `ascending`, at least k values in ascending order."""
    ways = comb(len(ascending), k)
    return sum(value * comb(below, k - 1) for below, value in enumerate(ascending)) / ways


class Majorities:
    """Which answer has the majority's vote among k answers to a prompt, drawn with replacement, for each draw."""

    def __init__(self, votes: Sequence[Sequence[str]]) -> None:
        """`votes` has the votes of each prompt's answers; equal texts are the same vote."""
        self._votes = [np.unique(row, return_inverse=True)[1].reshape(-1) for row in votes]
        self._found: dict[int, list[Indices]] = {}

    def of(self, k: int) -> list[Indices]:
        """For each prompt, the answer in each of `DRAWS` draws of k answers: the first with the most frequent vote. Of
        votes that are equally frequent, the one that was drawn first wins."""
        if k not in self._found:
            self._found[k] = [_winners(votes, k) for votes in self._votes]
        return self._found[k]


def _winners(votes: Indices, k: int) -> Indices:
    drawn = _draws(len(votes), k)
    kinds = int(votes.max()) + 1
    rows = np.arange(DRAWS)[:, None]
    counts = np.bincount((rows * kinds + votes[drawn]).ravel(), minlength=DRAWS * kinds).reshape(DRAWS, kinds)
    first = counts[rows, votes[drawn]].argmax(axis=1)
    winners: Indices = drawn[rows[:, 0], first]
    return winners


@lru_cache(maxsize=64)
def _draws(answers: int, k: int) -> Indices:
    """[DRAWS, k]: the answers in each draw, the same for every prompt and in every run, and the same as verl's."""
    return np.random.RandomState(SEED).choice(answers, size=(DRAWS, k), replace=True)
