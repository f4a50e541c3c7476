"""Each advantage estimator once more, from its paper's formula, on plain lists: slow and independent of torch.

An estimator takes the answers of a batch and returns for each the advantages of its generated tokens, or their returns
too where they differ.
"""

import itertools
import math
import statistics
from dataclasses import dataclass, field


@dataclass
class Answer:
    """What the policy generated for one sample, observations left out."""

    group: int
    rewards: list[float]
    values: list[float] = field(default_factory=list)
    old_logprobs: list[float] = field(default_factory=list)
    sum_pi_squared: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    several_rewards: list[float] = field(default_factory=list)
    greedy: float = 0.0
    turns: list[int] = field(default_factory=list)
    """Lengths of its turns."""

    @property
    def reward(self) -> float:
        return math.fsum(self.rewards)

    @property
    def length(self) -> int:
        return len(self.rewards)


Rows = list[list[float]]


def _mates(answers: list[Answer], answer: Answer) -> list[Answer]:
    return [other for other in answers if other.group == answer.group and other.length]


def _each(answers: list[Answer], rule) -> Rows:
    return [[rule(answer, _mates(answers, answer))] * answer.length if answer.length else [] for answer in answers]


def _std(values: list[float], ddof: int) -> float:
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def _whiten(rows: Rows, unbiased: bool = True) -> Rows:
    flat = list(itertools.chain(*rows))
    mean = statistics.fmean(flat)
    variance = _std(flat, int(unbiased)) ** 2
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def _to_go(values: list[float], factor: float) -> list[float]:
    return [math.fsum(value * factor**n for n, value in enumerate(values[t:])) for t in range(len(values))]


def grpo(answers, std=True, std_over="group", ddof=1, eps=1e-6, singleton="zero"):
    every = [answer.reward for answer in answers if answer.length]

    def rule(answer, mates):
        rewards = [mate.reward for mate in mates]
        alone = answer.reward if singleton == "reward" else 0.0
        centred = alone if len(mates) == 1 else answer.reward - statistics.fmean(rewards)
        if std_over == "batch":
            return centred / (_std(every, ddof) + eps)
        return centred / (_std(rewards, ddof) + eps) if std and len(mates) > 1 else centred

    return _each(answers, rule)


def grpo_passk(answers, std=True):
    def rule(answer, mates):
        if len(mates) == 1:
            return 0.0
        rewards = [mate.reward for mate in mates]
        others = list(rewards)
        others.remove(answer.reward)
        advantage = max(rewards) - max(others)  # leave one out of max(rewards)
        return advantage / (_std(rewards, 1) + 1e-6) if std else advantage

    return _each(answers, rule)


def passk(answers, k=4, threshold=0.5):
    """By going through all subsets of k, each with reward 1 if any of it is right."""

    def rule(answer, mates):
        me = next(i for i, mate in enumerate(mates) if mate is answer)
        subsets = list(itertools.combinations(range(len(mates)), k))
        solved = {subset: float(any(mates[i].reward > threshold for i in subset)) for subset in subsets}
        if not subsets or len(set(solved.values())) == 1:
            return 0.0
        mean, std = statistics.fmean(solved.values()), _std(list(solved.values()), 0)
        return statistics.fmean((solved[subset] - mean) / std for subset in subsets if me in subset)

    return _each(answers, rule)


def grpo_turns(answers, std=True, ddof=1, eps=1e-6, singleton="zero"):
    """Turn by turn: an episode's rewards from there on, beside those of the mates that come as far."""

    def from_turn(answer, k):
        return math.fsum(answer.rewards[sum(answer.turns[:k]) :])

    rows = []
    for answer in answers:
        row = []
        for k, length in enumerate(answer.turns):
            values = [from_turn(mate, k) for mate in _mates(answers, answer) if len(mate.turns) > k]
            own = from_turn(answer, k)
            if len(values) == 1:
                advantage = own if singleton == "reward" else 0.0
            else:
                advantage = own - statistics.fmean(values)
                advantage = advantage / (_std(values, ddof) + eps) if std else advantage
            row += [advantage] * length
        rows.append(row)
    return rows, [_to_go(answer.rewards, 1.0) for answer in answers]


def maxrl(answers):
    def rule(answer, mates):
        mean = statistics.fmean(mate.reward for mate in mates)
        return (answer.reward - mean) / mean if mean > 0 else 0.0

    return _each(answers, rule)


def rloo(answers):
    def rule(answer, mates):
        others = [mate.reward for mate in mates if mate is not answer]
        return answer.reward - statistics.fmean(others) if others else 0.0

    return _each(answers, rule)


def reinforce_plus_plus(answers, gamma=1.0, unbiased=True):
    returns = [_to_go(answer.rewards, gamma) for answer in answers]
    return _whiten(returns, unbiased), returns


def reinforce_plus_plus_baseline(answers, unbiased=True):
    return _whiten(grpo(answers, std=False), unbiased)


def remax(answers):
    returns = [_to_go(answer.rewards, 1.0) for answer in answers]
    return [[g - a.greedy for g in row] for row, a in zip(returns, answers, strict=True)], returns


def opo(answers):
    def rule(answer, mates):
        if len(mates) == 1:
            return 0.0
        total = math.fsum(mate.length for mate in mates)
        return answer.reward - math.fsum(mate.length * mate.reward for mate in mates) / total

    return _each(answers, rule)


def gpg(answers, count="groups"):
    present = [answer for answer in answers if answer.length]
    if count == "groups":
        giving = [a for a in present if len({mate.reward for mate in _mates(answers, a)}) > 1]
    else:
        giving = [a for a in present if a.reward != 0]
    alpha = len(present) / max(len(giving), 1)
    return [[alpha * value for value in row] for row in grpo(answers, std=False)]


def gdpo(answers, weights=None, batch="sequences"):
    count = len(answers[0].several_rewards)
    weights = weights or [1.0] * count

    def rule(answer, mates):
        if len(mates) == 1:
            return 0.0
        total = 0.0
        for k in range(count):
            rewards = [mate.several_rewards[k] for mate in mates]
            normal = (answer.several_rewards[k] - statistics.fmean(rewards)) / (_std(rewards, 1) + 1e-6)
            total += weights[k] * normal
        return total

    rows = _each(answers, rule)
    if batch == "tokens":
        return _whiten(rows)
    sums = [row[0] for row in rows if row]
    mean, std = statistics.fmean(sums), _std(sums, 1) + 1e-6
    return [[(value - mean) / std for value in row] for row in rows]


def gae(answers, gamma=1.0, lam=1.0, whiten=True):
    """By the definition as a sum of discounted TD errors, and returns as that plus the value."""
    advantages, returns = [], []
    for answer in answers:
        values = [*answer.values, 0.0]
        deltas = [answer.rewards[t] + gamma * values[t + 1] - values[t] for t in range(answer.length)]
        row = _to_go(deltas, gamma * lam)
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, answer.values, strict=True)])
    return (_whiten(advantages) if whiten else advantages), returns


def optimal_token_baseline(answers, zero_tail=True, weighted=False):
    returns = [_to_go(answer.rewards, 1.0) for answer in answers]
    advantages = []
    for i, answer in enumerate(answers):
        mates = [j for j, other in enumerate(answers) if other.group == answer.group and other.length]
        row = []
        for t in range(answer.length):
            there = [j for j in mates if answers[j].length > t]
            if len(mates) == 1:
                row.append(0.0)
                continue
            energy = {j: math.fsum(_energy(answers[j], u, weighted) for u in range(t + 1)) for j in there}
            baseline = math.fsum(returns[j][t] * energy[j] for j in there) / (math.fsum(energy.values()) + 1e-8)
            row.append(returns[i][t] - (0.0 if zero_tail and len(there) == 1 else baseline))
        advantages.append(row)
    return advantages, returns


def _energy(answer: Answer, t: int, weighted: bool) -> float:
    energy = 1 - 2 * math.exp(answer.old_logprobs[t]) + answer.sum_pi_squared[t]
    return energy * answer.weights[t] ** 2 if weighted else energy
