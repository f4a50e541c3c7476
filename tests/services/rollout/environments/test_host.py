"""What a user's class is asked, and what becomes of what it returns, without a process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from examples.environments.guess import Guess
from millrace.environments import Environment, Message, Step, ToolResult, tool
from millrace.environments.registry import check, load
from millrace.environments.tools import BadTool, tools_of
from millrace.errors import InvalidJob
from millrace.rewards.outcome import BadOutcome
from services.rollout.environments.host import BadReturn, Host
from tests.environments.asking import ask

ROW = {"index": 0, "data_source": "d", "prompt": "hi", "ground_truth": "37", "extra_info": {}}


GUESS = Path(__file__).parents[4] / "examples/environments/guess.py"


def test_the_example_is_played_from_its_first_message_to_its_score() -> None:
    host = Host(Guess, {"highest": 50}, 10.0)
    (message,) = ask(host, {"op": "reset", "row": ROW})["messages"]
    assert message["role"] == "user" and "from 1 to 50" in message["content"]
    assert [ask(host, {"op": "call", "name": "compare", "arguments": {"guess": n}}) for n in (40, 36, 37)] == [
        {"content": content, "failed": False, "reward": None, "done": False} for content in ("lower", "higher", "equal")
    ]
    said = ask(host, {"op": "step", "message": {"role": "assistant", "content": "thirty"}})
    assert (said["messages"][0]["role"], said["reward"], said["done"]) == ("user", 0.0, False)
    said = ask(host, {"op": "step", "message": {"role": "assistant", "content": " 37"}})
    assert (said["messages"], said["reward"], said["done"]) == ([], 1.0, True)
    assert ask(host, {"op": "score"}) == {"score": pytest.approx(-0.15), "details": {}}
    assert ask(host, {"op": "close"}) == {}


class Shop(Environment):
    @tool
    def buy(self, price: float) -> ToolResult:
        """Buys something."""
        return ToolResult({"paid": price}, reward=-price, done=price > 1.0)


def test_a_tool_may_say_what_the_turn_earns_and_that_the_episode_is_over() -> None:
    host = Host(Shop, {}, 10.0)
    ask(host, {"op": "reset", "row": ROW})
    told = ask(host, {"op": "call", "name": "buy", "arguments": {"price": 2.0}})
    assert told == {"content": '{"paid": 2.0}', "failed": False, "reward": -2.0, "done": True}
    with pytest.raises(BadOutcome, match="not a number to compute with"):
        ask(host, {"op": "call", "name": "buy", "arguments": {"price": 1e300}})


def test_a_tool_is_described_by_its_signature_and_docstring() -> None:
    (spec,) = Host(Guess, {}, 10.0).specs
    guess = {"type": "integer", "description": "A number that it may be."}
    assert spec["function"] == {
        "name": "compare",
        "description": "Says whether the number is higher or lower than a guess.",
        "parameters": {"type": "object", "properties": {"guess": guess}, "required": ["guess"]},
    }


class Clumsy(Environment):
    def __init__(self, returned: Any = None) -> None:
        self.returned = returned

    async def step(self, message: Message) -> Step:
        return self.returned  # type: ignore[no-any-return]

    async def score(self) -> Any:
        return self.returned

    @tool
    async def wait(self) -> str:
        """Waits longer than it may."""
        await asyncio.Event().wait()
        return ""

    @tool
    def fail(self, title: list[int], depth: int = 0) -> dict[str, Any]:
        """Fails at depth 0."""
        if depth == 0:
            raise KeyError("nothing there")
        return {"title": title}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("wait", {}, "Error: wait took longer than 0.05 s."),
        ("fail", {"title": []}, "Error: KeyError: 'nothing there'"),
        ("fail", {"title": ["x"]}, "Error: wrong arguments for fail: title.0: Input should be a valid integer"),
        ("fail", {}, "Error: wrong arguments for fail: title: Field required"),
        ("fail", {"title": [], "more": 1}, "Error: wrong arguments for fail: more: Extra inputs are not permitted"),
        ("fail", "oh", "Error: the arguments of fail are not an object"),
        ("step", {}, "Error: there is no tool step. Tools: wait, fail."),
    ],
)
def test_the_policy_is_told_what_is_wrong_with_a_call(name: str, arguments: Any, expected: str) -> None:
    host = Host(Clumsy, {}, 0.05)
    ask(host, {"op": "reset", "row": ROW})
    told = ask(host, {"op": "call", "name": name, "arguments": arguments})
    assert told["failed"] and told["content"].startswith(expected)


def test_a_result_that_is_no_text_is_told_as_json() -> None:
    host = Host(Clumsy, {}, 10.0)
    assert ask(host, {"op": "reset", "row": ROW})["messages"] == [{"role": "user", "content": "hi"}]
    told = ask(host, {"op": "call", "name": "fail", "arguments": {"title": [1], "depth": 2}})
    assert told == {"content": '{"title": [1]}', "failed": False, "reward": None, "done": False}
    assert host.specs[1]["function"]["parameters"]["properties"]["title"]["items"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("returned", "error", "reason"),
    [
        (None, BadReturn, "messages, reward, done"),
        (([{"role": "user"}], 0.0, False), BadReturn, "without role and content"),
        ((3, 0.0, False), BadReturn, "instead of messages"),
        (("go on", float("nan"), False), BadOutcome, "nan"),
    ],
)
def test_what_step_returns_has_to_be_a_step(returned: Any, error: type[Exception], reason: str) -> None:
    host = Host(Clumsy, {"returned": returned}, 10.0)
    ask(host, {"op": "reset", "row": ROW})
    with pytest.raises(error, match=reason):
        ask(host, {"op": "step", "message": {"role": "assistant", "content": ""}})


class Untyped(Environment):
    @tool
    def look(self, where):  # type: ignore[no-untyped-def]
        """Looks."""


def test_a_parameter_without_a_type_is_no_tool() -> None:
    with pytest.raises(BadTool, match="the parameter where of the tool look has no type annotation"):
        tools_of(Untyped, {})


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("", "Game", "has no class Game"),
        ("def Game(): ...", "Game", "Game is a function, not a class"),
        ("class Game: ...", "Game", "has no reset, step"),
        ("import oh no", "Game", "not readable as Python"),
    ],
)
def test_a_class_that_is_not_there_is_refused_without_running_the_file(
    text: str, name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(text)
    with pytest.raises(InvalidJob, match=rf"rollout.environment.name: .*{reason}"):
        check(f"{tmp_path}/game.py:{name}", {})


def test_the_example_is_found_and_its_options_are_checked() -> None:
    check(f"{GUESS}:Guess", {})
    assert load(f"{GUESS}:Guess", {"highest": 3}).__name__ == "Guess"
    with pytest.raises(InvalidJob, match=r"rollout.environment.options: .*unexpected keyword argument 'lowest'"):
        load(f"{GUESS}:Guess", {"lowest": 3})
