"""The trace, the parent and the job of a span. Services pass them on as W3C trace context and baggage."""

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Self

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
JOB_ITEM, STEP_ITEM = "millrace.job", "millrace.step"
"""Names of the items of the baggage."""
SAMPLED = 1
"""Flag of a traceparent: the trace is exported."""
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span that others can be parts of."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    sampled: bool = True
    """Whether the spans of the trace are exported over OTLP. They are kept for the timeline in any case."""
    job_id: str = ""
    step: int = 0
    """Step that the spans belong to; 0: not known yet, or before the first step."""
    group: str = ""
    """Id of the prompt whose group the spans belong to; empty: none."""

    @classmethod
    def new(cls, job_id: str, *, group: str = "") -> Self:
        """The root of a new trace."""
        return cls(f"{_random.getrandbits(128):032x}", new_span_id(), job_id=job_id, group=group)

    @classmethod
    def of_step(cls, job_id: str, lineage: int, step: int) -> Self:
        """The root of the trace of a step, or of the start of a job (step 0). It is computed from these values, so that
        it is the same after a restart of the coordinator."""
        lineage = lineage if step else 0  # what comes before the first start belongs to the start
        digest = hashlib.sha256(f"{job_id}/{lineage}/{step}".encode()).hexdigest()
        return cls(digest[:32], digest[32:48], job_id=job_id, step=step)

    @classmethod
    def parse(cls, traceparent: str, *, job_id: str = "", step: int = 0, group: str = "") -> Self | None:
        """The span that a `traceparent` names; None if the text is none."""
        found = TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return None
        trace_id, span_id, flags = found.groups()
        return cls(trace_id, span_id, bool(int(flags, 16) & SAMPLED), job_id, step, group)

    @property
    def traceparent(self) -> str:
        """The span in the words of W3C trace context."""
        return f"00-{self.trace_id}-{self.span_id}-{SAMPLED if self.sampled else 0:02x}"

    def unsampled(self) -> Self:
        """The same span of a trace that is not exported."""
        return replace(self, sampled=False)

    def child(self) -> Self:
        """A new span with this one as its parent."""
        return replace(self, span_id=new_span_id())


_current: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


def new_span_id() -> str:
    """A new random id, 16 hexadecimal digits."""
    return f"{random.getrandbits(64):016x}"


def current() -> TraceContext | None:
    """The span that the caller is a part of; None if it works for no job."""
    return _current.get()


@contextmanager
def within(context: TraceContext | None) -> Iterator[None]:
    """Spans that begin in this block, and in tasks that it starts, have `context` as their parent."""
    before = _current.set(context)
    try:
        yield
    finally:
        _current.reset(before)


def enter(context: TraceContext | None) -> None:
    """The rest of this task works within `context`."""
    _current.set(context)


def outgoing() -> tuple[tuple[str, str], ...]:
    """The current span as metadata of a call, which makes it the parent of the callee's spans; empty without one."""
    context = _current.get()
    if context is None:
        return ()
    items = f"{JOB_ITEM}={context.job_id},{STEP_ITEM}={context.step}"
    return (("traceparent", context.traceparent), ("baggage", items))


def incoming(metadata: Mapping[str, str | bytes]) -> TraceContext | None:
    """The caller's span from the metadata of a call; None if the call carries none."""
    traceparent, baggage = metadata.get("traceparent"), metadata.get("baggage", "")
    if not isinstance(traceparent, str) or not isinstance(baggage, str):
        return None
    items = dict(item.strip().partition("=")[::2] for item in baggage.split(","))
    step = items.get(STEP_ITEM, "")
    return TraceContext.parse(
        traceparent, job_id=items.get(JOB_ITEM, "")[:100], step=int(step) if re.fullmatch(r"\d{1,10}", step) else 0
    )
