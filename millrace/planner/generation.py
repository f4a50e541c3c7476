"""Seconds in which a replica generates its part of a step: alone, or at full load."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.planner.replica import Replica
from millrace.planner.workload import Workload
from millrace.simulation.engine import Answer, Engine, Group
from millrace.simulation.setting import Cycled, Setting, TrainerRate

SHUFFLE = 0.6180339887498949
"""Stride by which the lengths are taken, so that long ones do not all start at the end: the golden ratio."""
MOST_FOLLOWED = 512
"""Requests that are followed one by one; if a replica has more, each stands for several."""


@dataclass(frozen=True)
class Generation:
    """One replica's part of a step."""

    prefill_s: float
    """Seconds in which prompts are read, and their images seen."""
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
    lengths = quantiles(work.responses, followed)
    return _followed(replica, work, shuffled(lengths), requests / followed)


def quantiles(lengths: Sequence[float], count: int) -> list[float]:
    """Picks this many of the ascending lengths, always with the last one: every step has the longest response
    somewhere."""
    if count >= len(lengths):
        return [lengths[i * len(lengths) // count] for i in range(count)]
    if count == 1:
        return [lengths[-1]]
    return [lengths[round((i + 0.5) / count * len(lengths) - 0.5)] for i in range(count - 1)] + [lengths[-1]]


def _followed(replica: Replica, work: Workload, lengths: list[float], weight: float) -> Generation:
    """Follows requests of these lengths, each of which stands for `weight` of them, in a simulated engine."""
    engine = Engine(_setting(replica, work, lengths, weight), 0.0, 0)
    for place, length in enumerate(lengths):
        group = Group(place, left=1)
        group.answers = [Answer(group, length)]
        engine.take(group)
    engine.start()
    now, spans = 0.0, list[tuple[float, float]]()
    while engine.running:
        count, begun_s, now = engine.running * weight, now, engine.next_end()
        spans.append((count, now - begun_s))
        engine.advance(now)
        engine.ended()
        engine.start()
    most = max(count for count, _ in spans)
    decode = sum(seconds for _, seconds in spans)
    tail = sum(seconds for count, seconds in spans if count < most / 2)
    groups = weight * len(lengths) / work.samples
    read = replica.prefill(groups * work.mean_prompt) + groups * replica.seeing(work.image_tokens)
    return Generation(read, decode, tail, weight * sum(lengths), most, max(lengths))


@dataclass(frozen=True)
class _Decoding:
    """The rate of a replica whose prompts are read already."""

    replica: Replica

    def decode(self, running: float, context: float) -> float:
        return self.replica.decode(running, context)

    def prefill(self, tokens: float) -> float:
        return 0.0


def _setting(replica: Replica, work: Workload, lengths: list[float], weight: float) -> Setting:
    return Setting(
        prompts=len(lengths),
        samples=1,
        lengths=Cycled(lengths, 1),
        engine=_Decoding(replica),
        trainer=TrainerRate(),
        prompt_tokens=work.mean_prompt,
        slots=replica.slots,
        cached_tokens=replica.cached_tokens,
        state_tokens=replica.state_tokens,
        weight=weight,
    )


def steady(replica: Replica, work: Workload, replicas: int) -> Generation:
    """A replica's part of a step at full load: new requests take the places of those that end, and as many run as the
    bound lets be in flight (`max_staleness` of 1 and more). Each publication finds them running."""
    requests = work.sequences / replicas
    context = work.mean_prompt + work.mean_held_response
    held = context + replica.state_tokens
    running = min(replica.slots, requests * (work.max_staleness + 1), max(1.0, replica.cached_tokens / held))
    tokens = requests * work.mean_response
    decode = tokens / running * replica.decode(running, running * held)
    groups = requests / work.samples
    read = groups * work.mean_prompt
    if work.recomputes_cache:
        read, groups = read + running * context, groups + running / work.samples
    prefill = replica.prefill(read) + groups * replica.seeing(work.image_tokens)
    return Generation(prefill, decode, 0.0, tokens, running, float(work.longest_response))
