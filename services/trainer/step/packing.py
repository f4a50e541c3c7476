"""Division of sequences into micro-batches of at most a token budget."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Divides sequences into few micro-batches, lists of sequence indices.

    Longest first, each sequence goes into the micro-batch in which it leaves the least room.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, micro-batch), ascending
    for index in longest_first(lengths):
        length = lengths[index]
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            room, home = token_budget, len(bins)
            bins.append([])
        else:
            room, home = rooms.pop(at)
        bins[home].append(index)
        insort(rooms, (room - length, home))
    return bins


def spread(lengths: Sequence[int], loads: Sequence[float], token_budget: int, count: int) -> list[list[int]] | None:
    """Divides sequences into exactly `count` micro-batches of about equal load; None where some sequence has no room.

    Longest first, each sequence goes into the lightest micro-batch that has room. `loads` has a load for each sequence.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    open_bins = [(0.0, home, token_budget) for home in range(count)]  # lightest first: (load, micro-batch, room)
    short_bins: list[tuple[int, float, int]] = []  # micro-batches too full for the current length, most room first
    for index in longest_first(lengths):
        length = lengths[index]
        while short_bins and -short_bins[0][0] >= length:
            room, load, home = heapq.heappop(short_bins)
            heapq.heappush(open_bins, (load, home, -room))
        while open_bins and open_bins[0][2] < length:
            load, home, room = heapq.heappop(open_bins)
            heapq.heappush(short_bins, (-room, load, home))
        if not open_bins:
            return None
        load, home, room = open_bins[0]
        heapq.heapreplace(open_bins, (load + loads[index], home, room - length))
        bins[home].append(index)
    return bins


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices of the sequences by descending length; equal lengths in their order."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
