"""verl's tools and interactions, named by its files: what the policy is told, what it earns, what is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.environments.registry import check, load
from millrace.environments.verl.environment import VerlEnvironment
from millrace.errors import InvalidJob
from services.rollout.environments.host import Host
from tests.environments.asking import ask

EXAMPLE = Path(__file__).parents[2] / "examples/environments/verl_tools"
TOOLS, INTERACTION = str(EXAMPLE / "tools.yaml"), str(EXAMPLE / "interaction.yaml")
EXTRA = {
    "tools_kwargs": {"add": {"create_kwargs": {"ground_truth": "5"}}},
    "interaction_kwargs": {"name": "teacher", "ground_truth": "5"},
}
ROW = {"index": 0, "data_source": "d", "prompt": "2 and 3?", "ground_truth": "5", "extra_info": EXTRA}


def hosted(**options: Any) -> Host:
    host = Host(VerlEnvironment, options, 10.0)
    assert ask(host, {"op": "reset", "row": ROW})["messages"] == [{"role": "user", "content": "2 and 3?"}]
    return host


def said(host: Host, text: str) -> dict[str, Any]:
    return ask(host, {"op": "step", "message": {"role": "assistant", "content": text}})


def added(host: Host, number: Any) -> dict[str, Any]:
    return ask(host, {"op": "call", "name": "add", "arguments": {"number": number}})


def test_the_example_is_played_with_its_tool_and_its_interaction() -> None:
    host = hosted(tools=TOOLS, interaction=INTERACTION, rewards="tools")
    (spec,) = host.specs
    parameters = spec["function"].pop("parameters")
    assert spec["function"] == {"name": "add", "description": "Adds a number to the sum."}
    assert parameters["properties"] == {"number": {"type": "number", "description": "The number."}}
    assert added(host, 2) == {"content": "The sum is 2.", "failed": False, "reward": -0.05, "done": False}
    assert added(host, 3)["content"] == "The sum is 5."
    told = added(host, "x")
    assert told["failed"] and told["content"].startswith("Error: ValueError: ")
    wrong = said(host, "6")
    assert wrong["messages"] == [{"role": "user", "content": "That is wrong. Try again."}]
    assert (wrong["reward"], wrong["done"]) == (0.0, False)
    right = said(host, " 5")
    assert (right["reward"], right["done"]) == (1.0, True)
    assert ask(host, {"op": "score"}) == {"score": 1.0, "details": {"add_reward": 1.0}}
    assert ask(host, {"op": "close"}) == {}
    tool = sys.modules["adding"].Adder
    (made,) = (each.tool for each in VerlEnvironment.tools_with({"tools": TOOLS}).values())
    assert isinstance(made, tool) and made._sums == {}, "the instance is released"


def test_episodes_have_instances_of_their_own() -> None:
    host = hosted(tools=TOOLS)
    assert added(host, 2)["content"] == "The sum is 2."
    ask(host, {"op": "close"})
    ask(host, {"op": "reset", "row": ROW})
    assert added(host, 3)["content"] == "The sum is 3."


def test_as_in_verl_the_reward_function_scores_unless_the_tools_are_to() -> None:
    host = hosted(tools=TOOLS)
    assert added(host, 5)["reward"] is None
    assert said(host, "5") == {"messages": [], "reward": None, "done": True}, "without interaction a turn ends it"
    assert ask(host, {"op": "score"})["score"] is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tools: {", "cannot be read"),
        ("other: []", "has no list `tools`"),
        ("tools: [{class_name: Adder}]", "entry 0 names no class"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "entry 0 is a tool of an MCP server"),
    ],
)
def test_files_are_checked_at_submission(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    with pytest.raises(InvalidJob, match=f"rollout.environment.options.tools: .*{reason}"):
        check("verl", {"tools": str(path)})


def test_what_the_options_say_is_checked_at_submission() -> None:
    check("verl", {"tools": TOOLS, "interaction": INTERACTION})
    with pytest.raises(InvalidJob, match="neither tools nor interaction is given"):
        check("verl", {})
    with pytest.raises(InvalidJob, match=r"options.tools: .*No such file"):
        check("verl", {"tools": "/nowhere/tools.yaml"})
    with pytest.raises(InvalidJob, match=r"rollout.environment.options.tools"):
        check("verl", {"tools": "tools.yaml"})
    assert load("millrace.environments.verl.environment:VerlEnvironment", {"tools": TOOLS}) is VerlEnvironment
