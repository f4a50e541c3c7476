"""Seconds in which a replica generates its part of a step, found by following its requests.

Requests start while there are slots, and room in the cache for what the running ones hold. Between two ends of requests
the number of running ones is constant, and every step gives each one token.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.planner.replica import Replica
from millrace.planner.workload import Workload

SHUFFLE = 0.6180339887498949
"""Stride by which the lengths are taken, so that long ones do not all start at the end: the golden ratio."""
MOST_FOLLOWED = 512
"""Requests that are followed one by one; where a replica has more, each stands for several."""


@dataclass(frozen=True)
class Generation:
    """One replica's part of a step."""

    prefill_s: float
    decode_s: float
    tail_s: float
    """Seconds of `decode_s` in which less than half of the most requests ran."""
    tokens: float
    """Tokens generated."""
    most_running: float
    longest: float
    """Tokens of the longest response."""

    @property
    def total(self) -> float:
        return self.prefill_s + self.decode_s


def shuffled(lengths: Sequence[float]) -> list[float]:
    """The lengths in an order that mixes long and short ones, always the same."""
    order = sorted(range(len(lengths)), key=lambda i: (i * SHUFFLE) % 1.0)
    return [lengths[i] for i in order]


def alone(replica: Replica, work: Workload, replicas: int) -> Generation:
    """A step that begins and ends with an empty engine (`max_staleness: 0`, or GPUs shared in turns)."""
    requests = max(1.0, work.sequences / replicas)
    followed = min(int(-(-requests // 1)), MOST_FOLLOWED)
    lengths = _quantiles(work.responses, followed)
    return _followed(replica, work, shuffled(lengths), requests / followed)


def _quantiles(lengths: Sequence[float], count: int) -> list[float]:
    """So many of the ascending lengths, the last one among them: every step has the longest response somewhere."""
    if count >= len(lengths):
        return [lengths[i * len(lengths) // count] for i in range(count)]
    if count == 1:
        return [lengths[-1]]
    return [lengths[round((i + 0.5) / count * len(lengths) - 0.5)] for i in range(count - 1)] + [lengths[-1]]


def _followed(replica: Replica, work: Workload, lengths: list[float], weight: float) -> Generation:
    """Follows requests of these lengths, each of which stands for `weight` of them. `held`: tokens in the cache; `now`:
    steps since the beginning."""
    waiting, running = list(reversed(lengths)), list[tuple[float, float]]()
    now = held = most = 0.0
    spans: list[tuple[float, float]] = []
    while waiting or running:
        while waiting and _fits(replica, len(running) * weight, held, work.mean_prompt, weight):
            length = waiting.pop()
            heapq.heappush(running, (now + length, length))
            held += weight * work.mean_prompt
        count, (end, length) = len(running) * weight, running[0]
        steps = end - now
        spans.append((count, steps * replica.decode(count, held + count * steps / 2)))
        most, now, held = max(most, count), end, held + count * steps - weight * (work.mean_prompt + length)
        heapq.heappop(running)
    decode = sum(seconds for _, seconds in spans)
    tail = sum(seconds for count, seconds in spans if count < most / 2)
    requests = weight * len(lengths)
    prompts = requests / work.samples * work.mean_prompt
    return Generation(replica.prefill(prompts), decode, tail, weight * sum(lengths), most, max(lengths))


def _fits(replica: Replica, running: float, held: float, prompt: float, weight: float) -> bool:
    """Whether more requests can start. One always can."""
    if running == 0:
        return True
    return running + weight <= replica.slots and held + weight * prompt <= replica.cached_tokens


def steady(replica: Replica, work: Workload, replicas: int) -> Generation:
    """A replica's part of a step where generation never stops (`max_staleness` of 1 and more): new requests take the
    places of those that end, and as many run as the bound lets be in flight. Each publication finds them running."""
    requests = work.sequences / replicas
    context = work.mean_prompt + work.mean_held_response
    running = min(replica.slots, requests * work.max_staleness, max(1.0, replica.cached_tokens / context))
    tokens = requests * work.mean_response
    decode = tokens / running * replica.decode(running, running * context)
    read = requests / work.samples * work.mean_prompt
    if work.recomputes_cache:
        read += running * context
    return Generation(replica.prefill(read), decode, 0.0, tokens, running, float(work.longest_response))
