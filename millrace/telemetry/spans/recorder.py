"""Records the spans of a process. A span that does not fit is dropped and counted: recording never waits."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from millrace.telemetry.spans.context import TraceContext, current, new_span_id, within
from millrace.telemetry.spans.kinds import SpanKind

SWITCH = "MILLRACE_SPANS"
"""Environment variable: `off` records nothing in this process."""
MOST_WAITING = 8192
"""Spans that wait to be sent to the coordinator. One takes about 700 bytes here."""


@dataclass(frozen=True, slots=True)
class Span:
    """What was done, from when to when. Times are Unix times in seconds, of the host's clock."""

    kind: SpanKind
    context: TraceContext
    """The span itself: its trace, its id, and the job, step and group that it belongs to."""
    parent_id: str
    """Id of the span that it is a part of; empty: it is the root of its trace."""
    start_s: float
    end_s: float
    detail: str = ""
    """What more the kind does not say, such as the name of a tool."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name: tokens, bytes, samples; `failed` is 1 if the work ended with an error."""
    links: tuple[TraceContext, ...] = ()
    """Spans of other traces that it belongs together with."""


@dataclass(slots=True)
class OpenSpan:
    """A span that has not ended."""

    context: TraceContext
    detail: str
    figures: dict[str, float]


class Recorder:
    """Holds the spans of one process until they are sent. May be used from any thread."""

    def __init__(self, most_waiting: int = MOST_WAITING, enabled: bool = True) -> None:
        self.enabled = enabled
        self.export: Callable[[Span], None] | None = None
        """Is given every span of a trace that is sampled; see export.py."""
        self.sampled: Callable[[str], bool] = lambda _: True
        """Whether the new trace with this id is exported."""
        self._waiting: deque[Span] = deque()
        self._most = most_waiting
        self._dropped = 0

    def add(self, span: Span) -> None:
        """Records a span that has ended."""
        if not self.enabled:
            return
        if self.export is not None and span.context.sampled:
            self.export(span)
        if len(self._waiting) < self._most:
            self._waiting.append(span)
        else:
            self._dropped += 1

    def take(self, most: int) -> tuple[list[Span], int]:
        """Up to `most` spans that were not taken yet, the oldest first, and how many were dropped since the last
        call."""
        taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        dropped, self._dropped = self._dropped, 0
        return taken, dropped

    @contextmanager
    def span(
        self,
        kind: SpanKind,
        *,
        detail: str = "",
        parent: TraceContext | None = None,
        links: tuple[TraceContext, ...] = (),
        at_least_s: float = 0.0,
    ) -> Iterator[OpenSpan]:
        """Records the block as a part of the current span, or of `parent`; nothing if there is neither, or the block
        took less than `at_least_s` seconds."""
        above = parent or current()
        if above is None or not self.enabled:
            yield OpenSpan(above or NOWHERE, detail, {})
            return
        opened = OpenSpan(above.child(), detail, {})
        start_s, began = time.time(), time.perf_counter()
        try:
            with within(opened.context):
                yield opened
        except BaseException:
            opened.figures["failed"] = 1.0
            raise
        finally:
            seconds = time.perf_counter() - began
            if seconds >= at_least_s:
                ended = Span(
                    kind,
                    opened.context,
                    above.span_id,
                    start_s,
                    start_s + seconds,
                    opened.detail,
                    opened.figures,
                    links,
                )
                self.add(ended)

    def past(
        self,
        kind: SpanKind,
        parent: TraceContext | None,
        start_s: float,
        end_s: float,
        *,
        detail: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """Records work that is over as a part of `parent`; nothing without one. An end before its start is moved
        there: two hosts' clocks may differ."""
        if parent is not None:
            own = parent.child()
            self.add(Span(kind, own, parent.span_id, start_s, max(start_s, end_s), detail, figures or {}))

    def root(
        self,
        kind: SpanKind,
        context: TraceContext,
        start_s: float,
        end_s: float,
        *,
        links: tuple[TraceContext, ...] = (),
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """Records the root of a trace, which other spans have named as their parent before it ended."""
        self.add(Span(kind, context, "", start_s, max(start_s, end_s), "", figures or {}, links))


NOWHERE = TraceContext("0" * 32, new_span_id(), sampled=False)
RECORDER = Recorder(enabled=os.environ.get(SWITCH, "") != "off")
"""The recorder of this process."""
span = RECORDER.span
