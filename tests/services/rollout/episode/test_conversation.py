"""Conversations extend the tokens of the engine, whatever tokenizer and template do."""

import re
from typing import Any

import pytest

from millrace.errors import BadRow, InvalidJob
from services.rollout.engine import StopReason
from services.rollout.episode.chat import CALL_TOKENS, Chat
from services.rollout.episode.conversation import Conversation
from tests.models import byte_tokenizer
from tests.services.rollout.episode.formats import CHATML, FORGETS_THINKING, ROLES, TRIMS, merging_tokenizer, sampled

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


class Engine:
    """Remembers the whole sequence that an engine would have seen with each turn."""

    def __init__(self, tokenizer: Any, chat: Chat, *messages: dict[str, str]) -> None:
        self.tokenizer, self.seen = tokenizer, list[list[int]]()
        self.conversation = Conversation(chat, messages)

    def say(self, text: str, stop: StopReason = StopReason.END_OF_TURN) -> dict[str, Any]:
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        self.seen.append([*self.conversation.prompt, *tokens])
        return self.conversation.add(sampled(tokens, stop))

    def hear(self, content: str, role: str = "user", **more: str) -> None:
        self.conversation.tell([{"role": role, "content": content, **more}])

    def trained(self) -> list[list[int]]:
        """The tokens of each trajectory, prompt included."""
        return [
            [
                *one.prompt.tolist(),
                *(t for turn in one.turns for t in (*turn.given.tolist(), *turn.completion.tokens.tolist())),
            ]
            for one in self.conversation.trajectories()
            if one.prompt is not None
        ]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_tokens_that_would_merge_across_turns_are_trained_as_they_were_sampled() -> None:
    tokenizer = merging_tokenizer(ROLES)
    engine = Engine(tokenizer, Chat(tokenizer), user("hi"))
    engine.say("one.", StopReason.STOP_STRING)
    engine.hear("and")
    engine.say("two!", StopReason.STOP_STRING)
    (trained,) = engine.trained()
    assert trained == engine.seen[1] and trained[: len(engine.seen[0])] == engine.seen[0]
    text = tokenizer.decode(trained)
    assert text == "user: hi\nassistant: one.\nuser: and\nassistant: two!"
    assert tokenizer.encode(text) != trained, "the tokenizer does not merge: this test tests nothing"
    (trajectory,) = engine.conversation.trajectories()
    assert [turn.given_text for turn in trajectory.turns] == ["", "\nuser: and\nassistant: "]


def test_a_turn_with_unusual_tokens_keeps_them() -> None:
    """The same text in other tokens than the tokenizer makes, and a byte that is no text."""
    tokenizer = merging_tokenizer(ROLES)
    engine = Engine(tokenizer, Chat(tokenizer), user("hi"))
    odd = [*tokenizer.convert_tokens_to_ids([".", "Ċ", "â"])]
    engine.conversation.add(sampled(odd, StopReason.LENGTH))
    engine.hear("and")
    engine.say("x")
    (trajectory,) = engine.conversation.trajectories()
    assert trajectory.turns[0].completion.tokens.tolist() == odd and engine.trained() == [engine.seen[-1]]


def test_a_history_without_its_thinking_is_another_trajectory() -> None:
    tokenizer = merging_tokenizer(FORGETS_THINKING)
    engine = Engine(tokenizer, Chat(tokenizer), user("hi"))
    message = engine.say("<think>hm</think>one<|im_end|>")
    assert (message["content"], message["reasoning_content"]) == ("one", "hm")
    engine.hear("and")
    engine.say("two<|im_end|>")
    assert engine.trained() == engine.seen and len(engine.seen) == 2
    assert "hm" in tokenizer.decode(engine.seen[0]) and "hm" not in tokenizer.decode(engine.seen[1])
    engine.hear("more")
    engine.say("three<|im_end|>")
    assert engine.trained() == [engine.seen[0], engine.seen[2]], "a turn without thinking is extended"


@pytest.mark.parametrize(("text", "forks"), [("one", 0), ("one ", 1)])
def test_a_template_that_trims_forks_only_where_it_trims(text: str, forks: int) -> None:
    tokenizer = merging_tokenizer(TRIMS)
    engine = Engine(tokenizer, Chat(tokenizer), user("hi"))
    engine.say(f"{text}<|im_end|>")
    engine.hear("and")
    engine.say("two<|im_end|>")
    assert engine.trained() == engine.seen[1 - forks :]


def test_a_turn_that_was_cut_gets_its_end_from_the_template() -> None:
    tokenizer = merging_tokenizer(CHATML)
    engine = Engine(tokenizer, Chat(tokenizer), user("hi"))
    assert engine.say("on", StopReason.LENGTH)["stop_reason"] == "length"
    engine.hear("and")
    engine.say("two<|im_end|>")
    (trajectory,) = engine.conversation.trajectories()
    assert trajectory.turns[1].given_text == "<|im_end|>\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("renderer", ["default", "qwen3"])
def test_calls_of_tools_are_read_and_their_results_extend_the_tokens(renderer: str) -> None:
    tokenizer = merging_tokenizer(CHATML)
    options = {"tool_parser": "qwen3"} if renderer == "default" else {}
    engine = Engine(tokenizer, Chat(tokenizer, renderer, options, tools=[ADD]), user("hi"))
    message = engine.say('<tool_call>\n{"name":"add","arguments":{"a": 1}}\n</tool_call><|im_end|>')
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    engine.hear("2", role="tool", name="add", tool_call_id=call["id"])
    broken = engine.say('<tool_call>{"name": oh</tool_call><|im_end|>')
    assert (broken["tool_calls"][0]["status"], broken["tool_calls"][0]["raw"]) == ("invalid_json", '{"name": oh')
    assert engine.trained() == [engine.seen[1]]


CALLS = {
    "qwen3": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "qwen3.5": "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
    "glm": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}


def test_the_tokens_of_every_parser_are_known() -> None:
    from renderers.parsers import TOOL_PARSERS  # above, it would take each worker of pytest a second

    assert CALL_TOKENS.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize("parser", CALL_TOKENS)
def test_a_parser_whose_tokens_the_tokenizer_lacks_is_refused_where_there_are_tools(parser: str) -> None:
    """It would read none of the calls in CALLS, and say nothing."""
    for lacking in (None, *CALL_TOKENS[parser]):
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens([token for token in CALL_TOKENS[parser] if token != lacking])
        chat = Chat(tokenizer, options={"tool_parser": parser})
        said, _ = chat.read([], tokenizer.encode(CALLS[parser]), ended=False)
        (function,) = [call["function"] for call in said.get("tool_calls", []) if "function" in call] or [None]
        if lacking is None:
            assert function == {"name": "add", "arguments": '{"a": 1}'}
            assert chat.with_tools([ADD]).tools == [ADD]
            continue
        assert function != {"name": "add", "arguments": '{"a": 1}'}
        with pytest.raises(InvalidJob, match=rf'renderer_options.tool_parser: "{parser}": .*: {re.escape(lacking)}\. '):
            chat.with_tools([ADD])


@pytest.mark.parametrize(("retention", "forks"), [("all", 0), (None, 1)])
def test_a_renderer_says_whether_thinking_is_kept_before_a_new_question(retention: str | None, forks: int) -> None:
    tokenizer = merging_tokenizer(CHATML)
    options = {"thinking_retention": retention} if retention else {}
    engine = Engine(tokenizer, Chat(tokenizer, "qwen3", options), user("hi"))
    engine.say("<think>\nhm\n</think>\n\none<|im_end|>")
    engine.hear("and")
    engine.say("<think>\nah\n</think>\n\ntwo<|im_end|>")
    assert engine.trained() == engine.seen[1 - forks :]


def test_rewards_belong_to_the_turn_before() -> None:
    tokenizer = merging_tokenizer(CHATML)
    engine = Engine(tokenizer, Chat(tokenizer), user("hi"))
    engine.say("one<|im_end|>")
    engine.conversation.reward(0.5)
    engine.hear("and")
    engine.say("two<|im_end|>")
    (trajectory,) = engine.conversation.trajectories()
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.0]


def test_what_cannot_be_rendered_or_read_is_refused_in_plain_words() -> None:
    tokenizer = merging_tokenizer("{{ raise_exception('no such role') }}")
    with pytest.raises(BadRow, match="no such role"):
        Conversation(Chat(tokenizer), [user("hi")])
    with pytest.raises(InvalidJob, match="finds no calls of tools"):
        Chat(tokenizer, tools=[ADD])
    with pytest.raises(InvalidJob, match=r"rollout.environment.renderer: .*no-such.*no such renderer. .*qwen3,"):
        Chat(tokenizer, "no-such")
    with pytest.raises(InvalidJob, match=r"rollout.environment.renderer_options.no_such_option") as refusal:
        Chat(tokenizer, "qwen3", {"no_such_option": 1})
    assert "Config" not in str(refusal.value) and "validation error" not in str(refusal.value)
    with pytest.raises(InvalidJob, match=r'rollout.environment.renderer: "kimi-k2": it cannot be used with the model'):
        Chat(tokenizer, "kimi-k2")
