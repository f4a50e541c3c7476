"""A server of OpenEnv as an environment: a WebSocket for each episode, which is its session at the server.

Messages to the server are {type: "reset" | "step", data}; answers are {type: "observation", data: {observation, reward,
done}} or {type: "error", data: {message, code}}. Its `/schema` describes the action. A server with tools of its own has
two actions, which list and call them.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from millrace.environments.built_in import FIELD, OpenEnv
from millrace.errors import Unavailable, refused
from millrace.rewards.outcome import fits
from millrace.wire.reach import may_take_proxy
from services.rollout.environments.environment import Called, EnvironmentFailed, Message, Session, messages_of
from services.rollout.environments.host import LONGEST_RESULT

CONNECT_S = 30.0
LONGEST_MESSAGE = 16 << 20
"""Bytes of a message of the server."""
CAPACITY = "CAPACITY_REACHED"
"""Code of the error of a server that has no room for another session."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
"""Between two attempts to get a session at a full server."""
ACT = "act"
"""The tool by which the policy acts at a server that has no tools of its own."""
OF_TOOLS = {"type", "tool_name", "arguments", "metadata"}
"""The fields of the actions of a server with tools of its own."""


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Observed:
    """What the server answered to a reset or an action."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class OpenEnvServer:
    """A server that runs already."""

    def __init__(self, options: OpenEnv, at_once: int, call_s: float) -> None:
        """`at_once`: sessions of this replica at the same time. `call_s`: seconds of a reset or an action."""
        self._options, self._call_s = options, call_s
        self._room = asyncio.Semaphore(at_once)
        self.most_episodes = at_once
        self._has_tools = False
        self.tools: Sequence[Mapping[str, Any]] = ()

    async def start(self) -> None:
        """Asks the server for its action, and for its tools if the policy acts by tools."""
        schema = await self._action_schema()
        fields = set(schema.get("properties", {}))
        if (field := self._options.action_field) is not None:
            if field not in fields:
                fix = f"name one of {', '.join(sorted(fields - {'metadata'})) or 'its fields (it has none)'}."
                raise refused(f"{FIELD}.action_field", field, "the server's action has no such field", fix)
            return
        self._has_tools = fields <= OF_TOOLS
        self.tools = await self._own_tools() if self._has_tools else [_acting(schema, self._options.action)]

    async def close(self) -> None:
        """Sessions end with their episodes."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        async with self._room:
            session = _Session(self._options, self._call_s, has_tools=self._has_tools)
            try:
                yield session
            finally:
                await session.close()

    async def _action_schema(self) -> dict[str, Any]:
        url = f"{self._options.url.rstrip('/')}/schema"
        try:
            async with httpx.AsyncClient(timeout=CONNECT_S, trust_env=may_take_proxy(url)) as client:
                answer = await client.get(url)
                answer.raise_for_status()
                schema = answer.json()["action"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise self._unreachable(f"{url} does not describe an action: {error}") from error
        return schema if isinstance(schema, dict) else {}

    async def _own_tools(self) -> list[Mapping[str, Any]]:
        async with self.session() as session:
            try:
                await session.reset({"prompt": "", "extra_info": {}})
                assert isinstance(session, _Session)
                observed = await session.act({"type": "list_tools"})
            except (EnvironmentFailed, Refused) as error:
                raise self._unreachable(str(error)) from error
        listed = observed.observation.get("tools")
        if not isinstance(listed, list) or not all(isinstance(each, dict) and "name" in each for each in listed):
            raise self._unreachable("it lists no tools")
        return [_described(each) for each in listed]

    def _unreachable(self, why: str) -> Unavailable:
        fix = "start the server where every replica reaches it, or correct the address."
        return Unavailable(f"{FIELD}.url: {self._options.url}: {why}.", fix)


class _Session:
    """A session at the server. It begins with `reset`."""

    def __init__(self, options: OpenEnv, call_s: float, *, has_tools: bool) -> None:
        self._options, self._call_s, self._has_tools = options, call_s, has_tools
        self._socket: ClientConnection | None = None

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        given = (row.get("extra_info") or {}).get("reset") or {}
        observed = await self._begin({**self._options.reset, **given})
        if observed.done:
            raise EnvironmentFailed("reset: the episode is over already")
        messages, text = messages_of(row), self._text(observed.observation)
        last = messages[-1] if messages else {}
        if last.get("role") == "user" and isinstance(last.get("content"), str):
            content = "\n\n".join(filter(None, [last["content"], text]))
            return [*messages[:-1], {**last, "content": content}]
        return [*messages, {"role": "user", "content": text}]

    async def step(self, message: Mapping[str, Any]) -> tuple[list[Message], float | None, bool]:
        if (field := self._options.action_field) is None:
            return [], None, True  # it acts no more
        try:
            observed = await self.act({**self._options.action, field: message["content"]})
        except Refused as error:
            raise EnvironmentFailed(f"step: {error}") from error
        reply: Message = {"role": "user", "content": self._text(observed.observation)}
        return [reply], observed.reward, observed.done

    async def call(self, name: str, arguments: Any) -> Called:
        if not isinstance(arguments, Mapping):
            text = f"Error: the arguments of {name} are not an object with the parameters' names."
            return Called(text, failed=True)
        if self._has_tools:
            action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        elif name == ACT and self._options.action_field is None:
            action = {**arguments, **self._options.action}
        else:
            return Called(f"Error: there is no tool {name}.", failed=True)
        try:
            observed = await self.act(action)
        except Refused as error:
            return Called(f"Error: {error}"[:LONGEST_RESULT], failed=True)
        seen = observed.observation
        content = _result(seen) if self._has_tools else self._text(seen)
        failed = self._has_tools and bool(seen.get("error"))
        return Called(content, failed=failed, reward=observed.reward, done=observed.done)

    async def score(self) -> tuple[float | None, dict[str, Any]]:
        return None, {}

    async def act(self, action: Mapping[str, Any]) -> Observed:
        """What the server answers to an action. Raises EnvironmentFailed, Refused."""
        return await self._ask("step", action)

    async def close(self) -> None:
        """Ends the session, and does not wait for the server."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()

    async def _begin(self, parameters: Mapping[str, Any]) -> Observed:
        """Connects and resets. Waits as long as the server has no room."""
        wait_s = FIRST_WAIT_S
        while True:
            address = "ws" + self._options.url.rstrip("/").removeprefix("http") + "/ws"
            try:
                self._socket = await connect(
                    address, open_timeout=CONNECT_S, max_size=LONGEST_MESSAGE, proxy=may_take_proxy(address) or None
                )
                return await self._ask("reset", parameters)
            except Refused as error:
                if error.code != CAPACITY:
                    raise EnvironmentFailed(f"reset: {error}") from error
            except (OSError, TimeoutError, WebSocketException) as error:
                raise EnvironmentFailed(f"reset: no connection to {address}: {error}") from error
            await self.close()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        if self._socket is None:
            raise EnvironmentFailed(f"{kind}: there is no session at the server")
        try:
            async with asyncio.timeout(self._call_s):
                with contextlib.suppress(ConnectionClosed):  # what it said before it closed can still be read
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise EnvironmentFailed(f"{kind}: timeout after {self._call_s:g} s") from error
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailed(f"{kind}: the connection to the server is lost: {error}") from error
        except ValueError as error:
            raise EnvironmentFailed(f"{kind}: the server's answer is not JSON") from error
        return _observed(kind, answer)

    def _text(self, observation: Mapping[str, Any]) -> str:
        field = self._options.observation_field
        if field is None:
            return _as_text(observation)
        if field not in observation:
            raise EnvironmentFailed(f"the server's observation has no field {field}: {_as_text(observation)[:200]}")
        return _as_text(observation[field])


def _observed(kind: str, answer: Any) -> Observed:
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict):
        raise EnvironmentFailed(f"{kind}: the server's answer has no data")
    if answer.get("type") == "error":
        details = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in data.get("errors", [])]
        raise Refused(str(data.get("code", "")), "; ".join([str(data.get("message", "an error")), *details]))
    observation, reward = data.get("observation"), data.get("reward")
    number = None if reward is None else float(reward) if isinstance(reward, bool | int | float) else float("nan")
    if not isinstance(observation, dict) or (number is not None and not fits(number)):
        raise EnvironmentFailed(f"{kind}: the server answered the reward {reward!r}, or no observation")
    return Observed(observation, number, bool(data.get("done")))


def _result(seen: Mapping[str, Any]) -> str:
    """What a tool of the server answered: {result} or {error}, where a result may be content of MCP."""
    if error := seen.get("error"):
        return f"Error: {_as_text(error.get('message', error) if isinstance(error, dict) else error)}"
    result = seen.get("result")
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, list):
        result = "\n".join(str(each.get("text", "")) for each in content if isinstance(each, dict))
    return _as_text(result)


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:LONGEST_RESULT]


def _acting(schema: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool whose parameters are the fields of the action that the job does not give."""
    left_out = {"metadata", *given}
    properties = {name: each for name, each in schema.get("properties", {}).items() if name not in left_out}
    required = [name for name in schema.get("required", []) if name not in left_out]
    parameters = {"type": "object", "properties": properties, "required": required}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    described = {"name": ACT, "description": schema.get("description") or "Acts.", "parameters": parameters}
    return {"type": "function", "function": described}


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}
