"""The conversation of an episode. Every prompt of a trajectory begins with the tokens that the engine saw and sampled
before: no turn is made into tokens twice. If the chat format leaves no such prompt, the episode forks: what follows
is another trajectory, with the rewritten history as its prompt.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from services.rollout.engine import Completion, StopReason
from services.rollout.episode.chat import Chat, Message
from services.rollout.episode.episode import Trajectory
from services.rollout.episode.growing import Growing, Strand


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
