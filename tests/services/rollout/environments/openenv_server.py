"""A server that speaks OpenEnv's protocol, as its package 0.3.0 does: the game of the example `number_server.py`, an
echo whose action is text, and one with tools of its own."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

Observed = tuple[dict[str, Any], float | None, bool]
METADATA = {"metadata": {"type": "object", "additionalProperties": True}}
GUESS = {
    "description": "Guesses the number.",
    "properties": {**METADATA, "guess": {"type": "integer", "minimum": 1, "maximum": 100}},
    "required": ["guess"],
}
ECHO = {
    "properties": {**METADATA, "message": {"type": "string"}, "times": {"type": "integer"}},
    "required": ["message"],
}
OF_TOOLS = {"properties": {**METADATA, "type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}}}


class Invalid(Exception):
    """The action does not fit."""


class Number:
    schema = GUESS

    def reset(self, number: int = 1, **more: Any) -> Observed:
        self.number = number
        return {"text": "I think of a number from 1 to 100. Guess it."}, None, False

    def step(self, action: dict[str, Any]) -> Observed:
        guess = action.get("guess")
        if not isinstance(guess, int):
            raise Invalid
        if guess == self.number:
            return {"text": "equal"}, 1.0, True
        return {"text": "higher" if guess < self.number else "lower"}, -0.05, False


class Echo:
    schema = ECHO

    def reset(self, **parameters: Any) -> Observed:
        return {"said": json.dumps(parameters), "length": 0}, 0.0, parameters.get("over", False)

    def step(self, action: dict[str, Any]) -> Observed:
        if action["message"] == "fail":
            raise RuntimeError("no such word")
        return {"said": action["message"] * action.get("times", 1), "length": 1}, None, action["message"] == "end"


class Tools:
    schema = OF_TOOLS

    def reset(self, **parameters: Any) -> Observed:
        return {"ready": True}, None, False

    def step(self, action: dict[str, Any]) -> Observed:
        if action["type"] == "list_tools":
            tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}}
            return {"tools": [tool]}, None, False
        if "a" not in action["arguments"]:
            return {"tool_name": "add", "result": None, "error": {"message": "a is missing"}}, None, False
        content = [{"type": "text", "text": str(action["arguments"]["a"] + 1)}]
        return {"tool_name": "add", "result": {"content": content}, "error": None}, 0.5, False


class Server:
    """Serves one kind of game, at most `most` sessions at once."""

    def __init__(self, game: Callable[[], Any], most: int = 8) -> None:
        self.game, self.most, self.sessions, self.refused = game, most, 0, 0

    def http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        body = json.dumps({"action": self.game().schema, "observation": {}, "state": {}})
        return connection.respond(200, body)

    async def talk(self, socket: ServerConnection) -> None:
        if self.sessions >= self.most:
            self.refused += 1
            await socket.send(_error("CAPACITY_REACHED", "no room"))
            return
        self.sessions += 1
        try:
            game = self.game()
            async for text in socket:
                await socket.send(self.answer(game, json.loads(text)))
        except ConnectionClosed:
            return
        finally:
            self.sessions -= 1

    def answer(self, game: Any, message: dict[str, Any]) -> str:
        try:
            asked = game.reset(**message["data"]) if message["type"] == "reset" else game.step(message["data"])
        except Invalid:
            errors = [{"loc": ["guess"], "msg": "Input should be a valid integer"}]
            return _error("VALIDATION_ERROR", "Invalid message", errors=errors)
        except Exception as error:
            return _error("EXECUTION_ERROR", str(error))
        observation, reward, done = asked
        data = {"observation": observation, "reward": reward, "done": done}
        return json.dumps({"type": "observation", "data": data})


def _error(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


@asynccontextmanager
async def serving(game: Callable[[], Any], most: int = 8) -> AsyncIterator[tuple[str, Server]]:
    """Its address, and the server."""
    server = Server(game, most)
    async with serve(server.talk, "127.0.0.1", 0, process_request=server.http) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}", server
