"""What ends a response, and its text: the same rules for every engine, also for a response that another one began."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.engine import Completion, Partial, Sampling, StopReason


@dataclass(frozen=True)
class Endings:
    """What ends a response."""

    tokenizer: Any
    end_of_turn: frozenset[int]
    context: int
    """Largest number of tokens of a prompt and its response together."""

    def reason(self, prompt_tokens: int, tokens: Sequence[int], sampling: Sampling) -> StopReason | None:
        """Why a response that has at least one token is whole with its last one; None while it is not. The tokens
        before the last one did not end it."""
        if tokens[-1] in self.end_of_turn:
            return StopReason.END_OF_TURN
        if sampling.stop and self.stopped(tokens, sampling.stop):
            return StopReason.STOP_STRING
        full = prompt_tokens + len(tokens) >= self.context
        return StopReason.LENGTH if full or len(tokens) >= sampling.max_response_tokens else None

    def stopped(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether a stop string ends with the last token."""
        # A character has at most four bytes and a token at least one: the tail that a stop string can lie in.
        tail = 4 * (max(map(len, stop)) + 1)
        text = self._decode(tokens[-tail:])
        return any(one in text for one in stop)

    def text(self, tokens: Sequence[int], sampling: Sampling, reason: StopReason) -> str:
        """The text of a whole response."""
        text = self._decode(tokens)
        if reason is StopReason.STOP_STRING:
            # Bytes that are no character alone may form one with those before them; then only the tail shows the stop.
            found = (at for s in sampling.stop if (at := text.find(s)) >= 0)
            text = text[: min(found, default=len(text))]
        return text

    def whole(self, prompt_tokens: int, partial: Partial, sampling: Sampling) -> Completion | None:
        """The completion that `partial` is already; None if there are tokens to sample."""
        tokens = partial.tokens.tolist()
        if not tokens or (reason := self.reason(prompt_tokens, tokens, sampling)) is None:
            return None
        return Completion(
            tokens=partial.tokens,
            logprobs=partial.logprobs,
            versions=partial.versions,
            stop_reason=reason,
            text=self.text(tokens, sampling, reason),
            experts=partial.experts,
            carried=len(partial),
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class StopSearch:
    """Looks for the stop strings of a response that continues a prefix, token by token. A stop string may begin in the
    prefix, which the engine's own search takes for a part of the prompt."""

    def __init__(self, endings: Endings, sampling: Sampling, prefix: Partial) -> None:
        self._endings = endings
        self._stop = sampling.stop
        self._prefix = prefix.tokens.tolist()
        self._seen = 0
        self.needed = bool(self._stop and self._prefix)
        """Whether the engine's own search is not enough."""
        self.stopped: int | None = None
        """Number of tokens after the prefix that a stop string ends after."""

    def look(self, tokens: Sequence[int]) -> bool:
        """Whether a stop string ends the response. `tokens`: all tokens so far after the prefix."""
        if not self.needed or self.stopped is not None:
            return self.stopped is not None
        whole = [*self._prefix, *tokens]
        for count in range(self._seen + 1, len(tokens) + 1):
            if self._endings.stopped(whole[: len(self._prefix) + count], self._stop):
                self.stopped = count
                return True
        self._seen = len(tokens)
        return False
