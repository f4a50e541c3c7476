"""One sample of an engine, with its spans."""

import time
from collections.abc import Callable, Sequence

from millrace.telemetry.spans.context import current
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from services.rollout.engine import Engine, Sample, Sampling

OnSample = Callable[[Sample], None]
LEAST_WAIT_S = 0.001
"""A shorter wait for a slot is no span."""


async def sampled(engine: Engine, prompt_tokens: Sequence[int], sampling: Sampling, on_sample: OnSample) -> Sample:
    """One sample of the engine, with which `on_sample` is called. The wait for a slot and the generation are spans."""
    began_s, context = time.time(), current()
    sample = await engine.generate(prompt_tokens, sampling)
    slot_s = began_s + sample.waited_s
    if sample.waited_s > LEAST_WAIT_S:
        RECORDER.past(SpanKind.ENGINE_QUEUE, context, began_s, slot_s)
    tokens = float(len(sample.tokens))
    RECORDER.past(SpanKind.GENERATE, context, slot_s, time.time(), figures={"tokens": tokens})
    on_sample(sample)
    return sample
