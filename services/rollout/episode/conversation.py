"""The conversation of an episode, by messages or by tokens that a client makes itself. Every prompt of a trajectory
begins with the tokens that the engine saw and sampled before: no turn is made into tokens twice. If the chat format
leaves no such prompt, the episode forks: what follows is another trajectory, with the rewritten history as its prompt.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from services.rollout.engine import Completion, StopReason
from services.rollout.episode.admission import Seen
from services.rollout.episode.chat import Chat, Message
from services.rollout.episode.episode import Trajectory, Turn

Decode = Callable[[Sequence[int]], str]
"""The text of tokens, with special ones."""


@dataclass
class Growing:
    """The trajectory that the next turn extends."""

    tokens: list[int]
    """Prompt, turns and what was given, up to the next turn."""
    prompt: int
    """Number of tokens of the prompt."""
    turn: int
    """The index of the last turn's first token."""
    turns: list[Turn] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    """What was given since the last turn: the last of `tokens`."""

    @classmethod
    def begun(cls, prompt: Sequence[int]) -> Self:
        """The trajectory that begins with `prompt`."""
        return cls(list(prompt), prompt=len(prompt), turn=len(prompt))

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt, sampled and given."""
        return len(self.tokens) - self.prompt

    @property
    def seen(self) -> Seen | None:
        """What the engine has seen of `tokens`; None before the first turn, and if it keeps no prefixes."""
        cached = self.turns[-1].completion.cached if self.turns else None
        # The last token of a turn was sampled, and nothing computed with it.
        return None if cached is None else Seen(len(self.tokens) - len(self.given) - 1, cached)

    def added_by(self, prompt: Sequence[int]) -> Sequence[int] | None:
        """The tokens that `prompt` has after those of the trajectory; None if it does not begin with them."""
        known = len(self.tokens)
        return prompt[known:] if list(prompt[:known]) == self.tokens else None

    def give(self, tokens: Sequence[int]) -> None:
        """Adds what stands before the next turn."""
        self.given, self.tokens = [*self.given, *tokens], [*self.tokens, *tokens]

    def add(self, completion: Completion, decode: Decode) -> None:
        """Adds a turn that was sampled after `tokens`."""
        text = decode(self.given) if self.given else ""
        self.turns.append(Turn(completion, np.array(self.given, np.int32), text))
        self.turn, self.given, self.tokens = len(self.tokens), [], [*self.tokens, *completion.tokens.tolist()]

    def reward(self, value: float) -> None:
        """The last turn has earned `value`."""
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + value)

    def trajectory(self, decode: Decode) -> Trajectory:
        """What has grown. What was given after the last turn is not in it."""
        prompt = self.tokens[: self.prompt]
        return Trajectory(tuple(self.turns), np.array(prompt, np.int32), decode(prompt))


class Strand:
    """Trajectories, one after the other, of which the last may grow."""

    def __init__(self, chat: Chat, prompt: Sequence[int]) -> None:
        """Begins with the tokens `prompt`."""
        self._chat = chat
        self._growing = Growing.begun(prompt)

    @property
    def prompt(self) -> list[int]:
        """The tokens of the next request to the engine."""
        return self._growing.tokens

    @property
    def seen(self) -> Seen | None:
        """What the engine has seen of `prompt` with the turn before; None if there was none, or it does not tell."""
        return self._growing.seen

    @property
    def response_tokens(self) -> int:
        """Tokens of the trajectory that grows, after its first prompt."""
        return self._growing.response_tokens

    def trajectories(self) -> tuple[Trajectory, ...]:
        """All that have turns, in order. What was added after the last turn is in none."""
        return (self._growing.trajectory(self._chat.decode),) if self._growing.turns else ()


class TokenStrand(Strand):
    """A sequence that grows by the tokens of a client."""

    def added_by(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """What `tokens`, the next prompt, add to what was seen before; None if they do not begin with it."""
        return self._growing.added_by(tokens)

    def give(self, tokens: Sequence[int]) -> None:
        """Adds what stands before the next turn."""
        self._growing.give(tokens)

    def add(self, completion: Completion) -> None:
        """Adds a turn that was sampled after `prompt`."""
        self._growing.add(completion, self._chat.decode)


class Conversation(Strand):
    """A conversation in progress. Its methods change it, and do nothing else."""

    def __init__(self, chat: Chat, messages: Sequence[Message], prompt: Sequence[int] | None = None) -> None:
        """Begins with `messages`. `prompt`: their tokens, if the engine has seen them already; None: the chat format
        makes them. Raises BadRow."""
        super().__init__(chat, chat.render(messages) if prompt is None else prompt)
        self._history = list(messages)
        self._identities = [_identity(message) for message in messages]
        self._answered, self._calls = False, 0
        self._begun: list[tuple[int, int, Growing, int]] = []
        self._done: list[Trajectory] = []

    def add(self, completion: Completion, *, calls: bool = True) -> Message:
        """Adds a turn that was sampled after `prompt`. Returns it as the environment gets it; without `calls` what
        looks like a call of a tool is text."""
        now, ended = self._growing, completion.stop_reason is StopReason.END_OF_TURN
        message, remembered = self._chat.read(
            now.tokens, completion.tokens.tolist(), ended=ended, calls_before=self._calls
        )
        self._calls += len(message.get("tool_calls", ()))
        if not calls and message.pop("tool_calls", None):
            message["content"] = completion.text
        self._begun.append((len(self._identities), len(self._history), now, len(now.tokens)))
        now.add(completion, self._chat.decode)
        self._history.append(remembered)
        self._identities.append(_identity(message))
        self._answered = True
        return message | {"stop_reason": completion.stop_reason.name.lower()}

    def reward(self, value: float) -> None:
        """The last turn has earned `value`."""
        self._growing.reward(value)

    def tell(self, messages: Sequence[Message]) -> None:
        """Adds what follows the last turn. Raises BadRow."""
        now = self._growing
        given = self._chat.between(now.tokens, now.turn, self._history, messages)
        self._history += messages
        self._identities += map(_identity, messages)
        self._answered = False
        if given is None:
            self._done += super().trajectories()
            self._growing = Growing.begun(self._chat.render(self._history))
        else:
            now.give(given)

    def added_by(self, history: Sequence[Message]) -> list[Message] | None:
        """The messages that a client, which sends its whole `history` each time, adds to this conversation: those to
        `tell`, none if `prompt` waits for its answer already. None if the history is not this conversation's, or
        was rewritten.

        Messages of the policy are compared by their text and calls of tools: clients leave out reasoning, and rename
        calls."""
        known = len(self._identities)
        if list(map(_identity, history[:known])) != self._identities:
            return None
        new = list(history[known:])
        return new if bool(new) == self._answered else None

    def again(self, history: Sequence[Message]) -> Self | None:
        """A conversation that begins with the prompt of a turn that was sampled after exactly `history`, or that waits
        for its answer; None if there is none such. Its tokens are those that the engine saw."""
        known = list(map(_identity, history))
        for count, remembered, growing, end in self._begun:
            if count == len(known) and self._identities[:count] == known:
                return type(self)(self._chat, self._history[:remembered], growing.tokens[:end])
        if self._identities == known and not self._answered:
            return type(self)(self._chat, self._history, self.prompt)
        return None

    def trajectories(self) -> tuple[Trajectory, ...]:
        return (*self._done, *super().trajectories())


def _identity(message: Mapping[str, Any]) -> object:
    """What has to be equal in two messages that are the same one."""
    calls = [_call(call["function"]) for call in message.get("tool_calls") or () if "function" in call]
    return message.get("role"), message.get("content") or "", tuple(calls)


def _call(function: Mapping[str, Any]) -> object:
    arguments = function.get("arguments")
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = arguments
    return function.get("name"), json.dumps(read, sort_keys=True)
