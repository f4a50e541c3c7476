"""Which senders a target gets what from, where ranks lie on several hosts.

1. A sender on the target's own host comes before all others.
2. What has to cross the network is shared so that each host sends about as much as the others: hosts first, then the
   ranks of a host, as each host has network cards of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.weights.plans.boxes import Ints, sums
from millrace.weights.plans.wanted_pieces import WantedPieces

UNKNOWN = ""
"""A rank whose host is not known. It counts as the only rank of its host."""
TURNS = 64
"""Shares of hosts are rounded to 1/TURNS."""


@dataclass(frozen=True)
class Turns:
    """For each holder set the senders that take turns, one after the other: a rank that occurs twice sends twice as
    much as one that occurs once."""

    count: Ints
    """[sets] turns of each set."""
    first: Ints
    """[sets] the first turn of each set."""
    sender: Ints
    """The ranks, set after set."""

    @classmethod
    def of(cls, turns: Sequence[Ints]) -> "Turns":
        count = np.array([len(ranks) for ranks in turns], np.int64)
        return cls(count, np.cumsum(count) - count, np.concatenate([*turns, np.zeros(0, np.int64)]))


def turns_for(wanted: WantedPieces, hosts: Sequence[str], heads: Sequence[int]) -> Mapping[str, Turns]:
    """For each host of a receiver the senders' turns. `hosts`: the host of each rank; `heads`: the ranks that get
    their pieces from senders."""
    known = {host for host in hosts if host != UNKNOWN}
    receiving = dict.fromkeys(hosts[rank] for ranks in wanted.targets for rank in ranks)
    if len(known) < 2:
        return dict.fromkeys(receiving, Turns.of(wanted.holders))
    local = {
        host: [ranks[[hosts[rank] == host for rank in ranks.tolist()]] for ranks in wanted.holders]
        for host in receiving
        if host != UNKNOWN
    }
    remote = _remote(wanted.holders, hosts, _crossing(wanted, hosts, heads, local))
    of_host = {UNKNOWN: Turns.of(remote)} if UNKNOWN in receiving else {}
    for host, near in local.items():
        of_host[host] = Turns.of([own if len(own) else far for own, far in zip(near, remote, strict=True)])
    return of_host


def _crossing(
    wanted: WantedPieces, hosts: Sequence[str], heads: Sequence[int], local: Mapping[str, Sequence[Ints]]
) -> Ints:
    """[sets] bytes of each holder set that targets want which have no holder on their own host."""
    crossing = np.zeros(len(wanted.holders), np.int64)
    asked = set(heads)
    for span, ranks in zip(wanted.span, wanted.targets, strict=True):
        of_layout = sums(wanted.holder_set[span], wanted.bytes[span], len(crossing))
        for rank in asked.intersection(ranks):
            near = local.get(hosts[rank])
            crossing += of_layout if near is None else np.where([len(own) > 0 for own in near], 0, of_layout)
    return crossing


def _remote(holders: Sequence[Ints], hosts: Sequence[str], crossing: Ints) -> list[Ints]:
    """For each holder set the turns in which it sends to other hosts. Sets with fewest hosts first: those with many
    make up for what the others cannot balance."""
    by_host: list[dict[str, list[int]]] = []
    for ranks in holders:
        groups: dict[str, list[int]] = {}
        for rank in ranks.tolist():
            groups.setdefault(hosts[rank] or f"rank {rank}", []).append(rank)
        by_host.append(groups)
    load: dict[str, float] = {}
    turns: list[Ints] = [*holders]
    for number in sorted(range(len(holders)), key=lambda n: (len(by_host[n]), -int(crossing[n]), n)):
        groups = by_host[number]
        shares = _leveled([load.get(host, 0.0) for host in groups], float(crossing[number]))
        for host, share in zip(groups, shares, strict=True):
            load[host] = load.get(host, 0.0) + share
        if len(groups) > 1:
            turns[number] = _interleaved(list(groups.values()), shares)
    return turns


def _leveled(loads: Sequence[float], more: float) -> list[float]:
    """How to add `more` to `loads` so that the largest becomes as small as possible."""
    ordered = sorted(loads)
    below, level = 0.0, ordered[0] + more
    for count, load in enumerate(ordered, 1):
        below += load
        level = (below + more) / count
        if count < len(ordered) and level <= ordered[count]:
            break
    return [max(0.0, level - load) for load in loads]


def _interleaved(groups: Sequence[Sequence[int]], shares: Sequence[float]) -> Ints:
    """Turns of the groups' ranks in proportion to `shares`, each group's as far apart as possible. With equal shares of
    equally large groups each rank has one turn."""
    total = sum(shares)
    if total:
        # Multiples of the groups' sizes, so that each rank of a group has the same number of turns.
        common = math.lcm(*map(len, groups))
        counts = [round(TURNS * share / total) * common for share in shares]
        least = math.gcd(*(n // len(group) for group, n in zip(groups, counts, strict=True)))
        counts = [n // least for n in counts]
    else:
        counts = [len(group) for group in groups]
    when = [((turn + 0.5) / n, g, turn) for g, n in enumerate(counts) for turn in range(n)]
    return np.array([groups[g][turn % len(groups[g])] for _, g, turn in sorted(when)], np.int64)
