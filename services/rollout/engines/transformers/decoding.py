"""The decode loop of the `transformers` engine: continuous batching, with versions that change between two tokens."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.errors import InvalidState
from millrace.ids import Version
from services.rollout.engine import (
    NO_TOKENS,
    Completion,
    EngineDied,
    Partial,
    Sampling,
    VersionSpan,
    first_tokens,
)
from services.rollout.engines.endings import Endings
from services.rollout.engines.transformers.decode_batch import DecodeBatch, Routing
from services.rollout.engines.transformers.distribution import draw, processed_logprobs


@dataclass(eq=False)
class Request:
    """A sample that is being generated. `ended` is called in the loop's thread, with None if it was aborted."""

    prompt: Sequence[int]
    sampling: Sampling
    ended: Callable[[Completion | None], None]
    prefix: Partial = NO_TOKENS
    """The first tokens of the response."""
    tokens: list[int] = field(init=False)
    """The response so far, with the prefix."""
    logprobs: list[float] = field(init=False)
    versions: list[VersionSpan] = field(init=False)
    experts: list[NDArray[np.integer]] = field(default_factory=list)
    """The experts of all tokens but the last, one array for each forward pass."""
    aborted: bool = False

    def __post_init__(self) -> None:
        self.tokens, self.logprobs = self.prefix.tokens.tolist(), self.prefix.logprobs.tolist()
        self.versions = list(self.prefix.versions)

    def after(self, tokens: int) -> Partial:
        """What was sampled after the prefix and `tokens` tokens more. The loop may run meanwhile."""
        start, end = len(self.prefix) + tokens, len(self.logprobs)  # the log-probability comes last
        spans = first_tokens(self.versions[:], end)
        found = Partial(np.asarray(self.tokens[:end], np.int32), np.asarray(self.logprobs[:end], np.float32), spans)
        return found.after(start)

    def grow(self, token: int, logprob: float, version: Version) -> None:
        end = len(self.tokens) + 1
        if self.versions and self.versions[-1].version == version:
            self.versions[-1] = VersionSpan(version, self.versions[-1].start, end)
        else:
            self.versions.append(VersionSpan(version, end - 1, end))
        self.tokens.append(token)
        self.logprobs.append(logprob)


def finished(request: Request, endings: Endings) -> Completion | None:
    """The sample of a request, or None while it is not finished."""
    reason = endings.reason(len(request.prompt), request.tokens, request.sampling)
    if reason is None:
        return None
    experts = np.concatenate(request.experts) if request.experts else None
    if experts is not None and (before := request.prefix.experts) is not None:
        experts = np.concatenate([before, experts[len(before) :]])
    return Completion(
        tokens=np.asarray(request.tokens, dtype=np.int32),
        logprobs=np.asarray(request.logprobs, dtype=np.float32),
        versions=tuple(request.versions),
        stop_reason=reason,
        text=endings.text(request.tokens, request.sampling, reason),
        experts=experts,
        carried=len(request.prefix),
    )


class Pause:
    """One request to pause the loop. Its maker ends it, once."""


class DecodeLoop:
    """`run` is called in a thread of its own, every other method from any thread."""

    def __init__(self, model: Any, endings: Endings, capacity: int, seed: int, routing: Routing | None = None) -> None:
        self._model = model
        self._endings = endings
        self._capacity = capacity
        self._generator = torch.Generator(model.device).manual_seed(seed)
        self._batch = DecodeBatch(model, routing)
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._version: Version | None = None
        self._recompute = False
        self._pauses: set[Pause] = set()
        self._is_paused = False
        self._stopped = False
        self._ended = False
        self._wake = threading.Condition()

    def submit(self, request: Request) -> None:
        """Raises InvalidState if no version is in place."""
        with self._wake:
            if self._version is None:
                raise InvalidState("no version is in place.", "the prompt is issued again.")
            self._waiting.append(request)
            self._wake.notify_all()

    def abort(self, request: Request) -> None:
        with self._wake:
            request.aborted = True
            self._wake.notify_all()

    def counts(self) -> tuple[int, int]:
        """Requests running and waiting."""
        with self._wake:
            return sum(not r.aborted for r in self._running), sum(not r.aborted for r in self._waiting)

    def pause(self) -> Pause:
        """Asks the loop to pause between two tokens, keeping every request. `wait_paused` waits for that."""
        with self._wake:
            pause = Pause()
            self._pauses.add(pause)
            self._wake.notify_all()
            return pause

    def wait_paused(self, pause: Pause) -> None:
        """Returns once the loop has paused, or `pause` was ended before. Raises EngineDied if the loop ended."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_paused or self._ended or pause not in self._pauses)
            if self._ended:
                raise EngineDied("the decode loop ended.")

    def resume(self, pause: Pause, *, recompute: bool = False) -> None:
        """Ends `pause`; the loop runs again when no pause is left. With `recompute`, requests in flight are prefilled
        again under the weights in place."""
        with self._wake:
            self._recompute = self._recompute or recompute
            self._pauses.discard(pause)
            self._is_paused = self._is_paused and bool(self._pauses)
            self._wake.notify_all()

    def set_version(self, version: Version) -> None:
        """Tokens that are sampled from now on are of `version`. Called while the loop is paused."""
        with self._wake:
            self._version = version

    def drop_version(self) -> None:
        """No version is in place any more: aborts all requests. Called while the loop is paused, or has ended."""
        with self._wake:
            self._version = None
            for request in [*self._running, *self._waiting]:
                request.aborted = True
            self._wake.notify_all()

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify_all()

    def run(self) -> None:
        """Decodes until `stop`; raises what the model raises."""
        try:
            while self._between_tokens():
                self._token()
        finally:
            with self._wake:
                self._ended = True
                self._wake.notify_all()

    def _between_tokens(self) -> bool:
        """Waits for work and drops aborted requests. Answers whether there is work; otherwise the loop was stopped."""
        with self._wake:
            while not self._stopped:
                if self._pauses:
                    self._is_paused = True
                    self._wake.notify_all()
                    self._wake.wait()
                    continue
                self._drop_aborted()
                if self._recompute:
                    self._recompute = False
                    self._waiting, self._running = self._running + self._waiting, []
                    self._batch.keep([])
                if self._running or self._waiting:
                    return True
                self._wake.wait()
            return False

    def _drop_aborted(self) -> None:
        for request in [r for r in [*self._running, *self._waiting] if r.aborted]:
            request.ended(None)
        self._waiting = [r for r in self._waiting if not r.aborted]
        self._keep([i for i, r in enumerate(self._running) if not r.aborted])

    def _token(self) -> None:
        """One token for every running row, and the first one for the rows that are admitted."""
        with self._wake:
            room = self._capacity - len(self._running)
            admitted, self._waiting = self._waiting[:room], self._waiting[room:]
            running = list(self._running)
            self._running += admitted
        logits = []
        if running:
            logits.append(self._batch.step([r.tokens[-1] for r in running]))
            for request, chosen in zip(running, self._batch.experts, strict=False):
                request.experts.append(chosen)
        if admitted:
            logits.append(self._batch.add([[*r.prompt, *r.tokens] for r in admitted]))
            for request, chosen in zip(admitted, self._batch.experts, strict=False):
                request.experts = [chosen]
        self._grow(torch.cat(logits))
        going = []
        for row, request in enumerate(self._running):
            if (completion := finished(request, self._endings)) is None:
                going.append(row)
            else:
                request.ended(completion)
        with self._wake:
            self._keep(going)

    def _grow(self, logits_bv: torch.Tensor) -> None:
        """Draws the next token of every row."""
        assert self._version is not None
        wanted, device = [r.sampling for r in self._running], logits_bv.device
        temperature_b = torch.tensor([s.temperature for s in wanted], device=device)
        logprobs_bv = processed_logprobs(
            logits_bv,
            temperature_b,
            torch.tensor([s.top_k for s in wanted], device=device),
            torch.tensor([s.top_p for s in wanted], device=device),
        )
        tokens_b = draw(logprobs_bv, temperature_b == 0, self._generator)
        drawn_b = logprobs_bv.gather(1, tokens_b[:, None])[:, 0]
        for request, token, logprob in zip(self._running, tokens_b.tolist(), drawn_b.tolist(), strict=True):
            request.grow(token, logprob, self._version)

    def _keep(self, rows: list[int]) -> None:
        self._batch.keep(rows)
        self._running = [self._running[row] for row in rows]
