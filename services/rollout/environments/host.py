"""Runs environments in a process of their own: from a request in JSON's types to its answer.

Requests are {op: "reset", row}, {op: "step", message}, {op: "call", name, arguments}, {op: "score"}, {op: "close"},
each with the {episode} that it is for. What the user's class raises is passed on, except from a tool: then the policy
gets the error as the tool's result.
"""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.environments import ToolResult
from millrace.environments.tools import BadArguments, tools_of
from millrace.rewards.outcome import fits, plain, read_outcome

LONGEST_RESULT = 256 << 10
"""Characters of a tool's result. The rest is cut, as answers of a process have a longest line."""


class BadReturn(ValueError):
    """A method of the environment returned something that cannot be used."""


class TooSlow(Exception):
    """An `async` method of the environment took longer than it may."""


class Host:
    """Holds the environments of the running episodes. Those with `async` methods wait side by side."""

    def __init__(self, environment: type, options: Mapping[str, Any], call_s: float) -> None:
        """`call_s`: seconds after which an `async` method is cancelled. Raises BadTool."""
        self.tools = tools_of(environment, options)
        self._class, self._options, self._call_s = environment, dict(options), call_s
        self._running: dict[int, Any] = {}
        self._calls: dict[int, asyncio.Task[Any] | None] = {}

    @property
    def specs(self) -> list[dict[str, Any]]:
        """The tools, as chat templates take them."""
        return [each.spec for each in self.tools.values()]

    @property
    def episodes(self) -> int:
        """Number of episodes that run."""
        return len(self._running)

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises BadReturn, TooSlow, and whatever the user's class raises. "close" ends a
        request of the same episode that was given up."""
        episode = int(request["episode"])
        if request["op"] == "close":
            if (given_up := self._calls.pop(episode, None)) is not None:
                given_up.cancel()
                await asyncio.wait({given_up})
            running = self._running.pop(episode, None)
            if running is not None:
                await self._limited(running.close())
            return {}
        self._calls[episode] = call = asyncio.current_task()
        try:
            return await self._answer(episode, request)
        finally:
            if self._calls.get(episode) is call:
                del self._calls[episode]

    async def _answer(self, episode: int, request: Mapping[str, Any]) -> dict[str, Any]:
        if (op := request["op"]) == "reset":
            self._running[episode] = self._class(**self._options)
        running = self._running[episode]
        match op:
            case "reset":
                return {"messages": _messages(await self._limited(running.reset(request["row"])), op)}
            case "step":
                return _step(await self._limited(running.step(request["message"])))
            case "call":
                return await self._call(running, request["name"], request["arguments"])
            case "score":
                return _score(await self._limited(running.score()))
            case other:
                raise BadReturn(f"there is no request {other}")

    async def _limited(self, value: Any) -> Any:
        """What a method returned. Raises TooSlow."""
        if not inspect.isawaitable(value):
            return value
        limit = asyncio.timeout(self._call_s)
        try:
            async with limit:
                return await value
        except TimeoutError as error:
            if limit.expired():
                raise TooSlow(f"timeout after {self._call_s:g} s") from error
            raise

    async def _call(self, running: Any, name: str, given: Any) -> dict[str, Any]:
        found = self.tools.get(name)
        if found is None:
            known = ", ".join(self.tools) or "none"
            return _failed(f"there is no tool {name}. Tools: {known}.")
        try:
            arguments = found.checked(given)
            result = await self._limited(found.call(running, arguments))
        except BadArguments as error:
            return _failed(f"{error}.")
        except TooSlow:
            return _failed(f"{name} took longer than {self._call_s:g} s.")
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            # The user's tool may raise anything. The policy gets the error as it gets a result.
            return _failed(f"{type(error).__name__}: {error}")
        return _called(name, result)


def _failed(reason: str) -> dict[str, Any]:
    return {"content": f"Error: {reason}"[:LONGEST_RESULT], "failed": True, "reward": None, "done": False}


def _called(name: str, returned: Any) -> dict[str, Any]:
    result = returned if isinstance(returned, ToolResult) else ToolResult(returned)
    text = result.content
    content = text if isinstance(text, str) else json.dumps(plain(text), ensure_ascii=False)
    reward = _reward(result.reward, name)
    return {"content": content[:LONGEST_RESULT], "failed": False, "reward": reward, "done": bool(result.done)}


def _messages(returned: Any, method: str) -> list[dict[str, Any]]:
    if isinstance(returned, str):
        return [{"role": "user", "content": returned}]
    if not isinstance(returned, Sequence):
        raise BadReturn(f"{method} returned {type(returned).__name__} instead of messages")
    for message in returned:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadReturn(f"{method} returned a message without role and content")
    return [plain(message) for message in returned]


def _step(returned: Any) -> dict[str, Any]:
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != 3:
        raise BadReturn("step returned something else than (messages, reward, done)")
    messages, reward, done = returned
    return {"messages": _messages(messages or [], "step"), "reward": _reward(reward, "step"), "done": bool(done)}


def _reward(given: Any, method: str) -> float | None:
    number = None if given is None else read_outcome(given).score
    if number is not None and not fits(number):
        raise BadReturn(f"{method} returned the reward {number}")
    return number


def _score(returned: Any) -> dict[str, Any]:
    if returned is None:
        return {"score": None, "details": {}}
    outcome = read_outcome(returned)
    return {"score": outcome.score, "details": outcome.details}
