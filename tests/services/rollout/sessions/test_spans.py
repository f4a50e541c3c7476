"""What an agent asks for over HTTP belongs to the trace of the lease."""

import asyncio

from millrace.telemetry.spans.context import TraceContext, within
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER, Span
from tests.services.rollout.sessions.served import served, user

LEASE = TraceContext.new("job-0123456789ab", group="0-1")


def test_a_turn_is_a_span_of_the_lease() -> None:
    async def scenario() -> None:
        async with served(lambda _: "hello") as here:
            with within(LEASE):
                playing = here.play()
            claimed = await here.claim()
            await here.chat(claimed, user("hi"))
            await here.post(claimed, "/end", reward=1.0)
            await playing

    RECORDER.take(10_000)
    asyncio.run(scenario())
    spans = {span.kind: span for span in _of_the_lease(RECORDER.take(10_000)[0])}
    turn, agent = spans[SpanKind.GENERATE], spans[SpanKind.ENVIRONMENT]
    assert turn.figures["tokens"] > 1 and (agent.detail, agent.parent_id) == ("agent", LEASE.span_id)
    assert agent.start_s <= turn.start_s <= turn.end_s <= agent.end_s


def _of_the_lease(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.context.trace_id == LEASE.trace_id]
