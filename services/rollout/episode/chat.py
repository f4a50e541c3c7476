"""A model's chat format: messages to tokens, tokens to a message, and what is put between two turns.

The `renderers` library knows the formats of many models. For any other chat template its `default` renderer is used,
and what is put between two turns is found here, in the text that the template makes.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from jinja2 import TemplateError
from pydantic import ValidationError

from millrace.errors import BadRow, InvalidJob, refused
from millrace.software import how_to_install
from millrace.validation.mistakes import explain

ENVIRONMENT = "rollout.environment"
DEFAULT = "default"
NOT_NAMED = frozenset({"auto", "custom"})
"""Names of the library that stand for another renderer, or for code outside it."""
CALL_TOKENS = {
    "qwen3": ("<tool_call>", "</tool_call>"),
    "qwen3.5": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "deepseek-v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
}
"""The tokens by which each `tool_parser` of the library reads a call. If one is not in the vocabulary it reads none,
whatever the text says."""
Message = dict[str, Any]


class Chat:
    """The chat format of one job."""

    def __init__(
        self,
        tokenizer: Any,
        renderer: str = DEFAULT,
        options: Mapping[str, Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        field: str = ENVIRONMENT,
    ) -> None:
        """`tools`: what the policy may call, as OpenAI describes functions. `field`: the section of the job spec
        that names the renderer. Raises InvalidJob for a renderer that does not exist, is not installed, or cannot read
        calls of tools although there are some, of itself or for want of a token."""
        self._tokenizer = tokenizer
        self._template_options = dict(template_options or {})
        self._is_default = renderer == DEFAULT
        self._name, self._field = renderer, field
        self._tool_parser = (options or {}).get("tool_parser") if self._is_default else None
        self._renderer = _create(tokenizer, renderer, {**(options or {}), **self._template_options}, field)
        self._take_tools(tools)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the tokenizer knows."""
        return len(self._tokenizer)

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token's text, or a few more. Goes over the whole vocabulary."""
        return max(len(token.encode(errors="replace")) for token in self._tokenizer.get_vocab())

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "Chat":
        """The same format with other tools. Raises InvalidJob if it cannot read calls of tools although there are
        some."""
        other = copy.copy(self)
        other._take_tools(tools)
        return other

    def _take_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tools = [dict(each) for each in tools] or None
        if self.tools and not getattr(self._renderer, "supports_tools", True):
            reason = "it finds no calls of tools, and there are tools"
            fix = "name the model's renderer, or set renderer_options to {tool_parser: qwen3} for that format of calls."
            raise refused(f"{self._field}.renderer", self._name, reason, fix)
        lacking = [token for token in CALL_TOKENS.get(self._tool_parser or "", ()) if not self._knows(token)]
        if self.tools and lacking:
            reason = f"it reads calls of tools by tokens that the model's tokenizer does not have: {', '.join(lacking)}"
            fix = "name the parser of this model's format, or add the tokens to its tokenizer."
            raise refused(f"{self._field}.renderer_options.tool_parser", self._tool_parser, reason, fix)

    def _knows(self, token: str) -> bool:
        """Whether `token` is one token of the tokenizer."""
        return self._tokenizer.convert_tokens_to_ids(token) not in (
            None,
            getattr(self._tokenizer, "unk_token_id", None),
        )

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a whole conversation, after which the policy speaks. Raises BadRow."""
        try:
            return list(self._renderer.render_ids(list(messages), tools=self.tools, add_generation_prompt=True))
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise _refusal(error) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def read(
        self, prompt: Sequence[int], sampled: Sequence[int], *, ended: bool, calls_before: int = 0
    ) -> tuple[Message, Message]:
        """What the policy said after `prompt`, as the environment gets it and as it stands in the history.

        `ended`: the last token is one that ends a turn. `calls_before`: in earlier turns, for the ids of calls. A call
        of a tool that cannot be read has no `function`, but its `status` and `raw` text.
        """
        parsed = self._renderer.parse_response(list(sampled), tools=self.tools, prompt_ids=list(prompt))
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls = [_call(number, each) for number, each in enumerate(parsed.tool_calls, calls_before)]
        if self._is_default:  # the template is not known: it gets the text as it was said
            return message | ({"tool_calls": calls} if calls else {}), {
                "role": "assistant",
                "content": self._text_after(prompt, sampled[:-1] if ended else sampled),
            }
        good = [{key: call[key] for key in ("id", "type", "function")} for call in calls if "function" in call]
        return message | ({"tool_calls": calls} if calls else {}), message | ({"tool_calls": good} if good else {})

    def between(
        self, seen: Sequence[int], turn: int, history: Sequence[Message], new: Sequence[Message]
    ) -> list[int] | None:
        """The tokens that follow `seen`, so that the policy answers `new`; None if the format writes what was said
        before in another way, so that `seen` is not the beginning of any prompt.

        `seen` are the tokens of the engine up to the end of a turn that began at `turn`, `history` the messages that
        they stand for. Raises BadRow.
        """
        try:
            if self._is_default:
                return self._between_texts(seen, [*history, *new])
            bridged = self._renderer.bridge_to_next_turn(
                list(seen[:turn]), list(seen[turn:]), list(new), tools=self.tools
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise _refusal(error) from error
        if bridged is None or bridged.token_ids[: len(seen)] != list(seen):
            return None
        return list(bridged.token_ids[len(seen) :])

    def _between_texts(self, seen: Sequence[int], messages: list[Message]) -> list[int] | None:
        options = {"add_generation_prompt": True, **self._template_options, "tokenize": False}
        whole = str(self._tokenizer.apply_chat_template(messages, tools=self.tools, **options))
        before = self.decode(seen)
        if not whole.startswith(before):
            return None
        return list(self._tokenizer.encode(whole[len(before) :], add_special_tokens=False)) or None

    def _text_after(self, prompt: Sequence[int], sampled: Sequence[int]) -> str:
        """The text of sampled tokens as it stands after the prompt: decoders may treat the first token of a text in
        another way."""
        before, whole = self.decode(prompt), self.decode([*prompt, *sampled])
        return whole[len(before) :] if whole.startswith(before) else self.decode(sampled)


def _create(tokenizer: Any, name: str, options: Mapping[str, Any], section: str) -> Any:
    field = f"{section}.renderer"
    try:
        from openai_harmony import HarmonyError
        from renderers import RendererConfig, create_renderer
    except ImportError as error:
        fix = f"install it on the replicas' hosts: {how_to_install('environments')}."
        raise refused(field, name, "the library renderers is not installed", fix) from error
    union, *_ = get_args(RendererConfig)
    configs = {each.model_fields["name"].default: each for each in get_args(union)}
    if name not in configs or name in NOT_NAMED:
        known = ", ".join(sorted(configs.keys() - NOT_NAMED))
        raise refused(field, name, "there is no such renderer", f"name one of {known}.")
    try:
        config = configs[name](**options)
    except ValidationError as error:
        raise InvalidJob.of(explain(error.errors(), configs[name], f"{field}_options")) from error
    try:
        return create_renderer(tokenizer, config)
    except (ValueError, TypeError, KeyError, AssertionError, HarmonyError) as error:
        fix = "name the renderer of the model, or default, which takes its chat template."
        raise refused(field, name, f"it cannot be used with the model's tokenizer: {error}", fix) from error


def _call(number: int, parsed: Any) -> dict[str, Any]:
    """A call of a tool as chat completions have it."""
    call: dict[str, Any] = {"id": parsed.id or f"call_{number}", "type": "function"}
    # Formats that write arguments as plain text report every one that is not JSON; it is a string then.
    is_plain_text = parsed.status.value == "invalid_json" and isinstance(parsed.arguments, dict)
    if parsed.name is None or not (is_plain_text or parsed.status.value in ("ok", "unknown_tool")):
        return call | {"status": parsed.status.value, "raw": parsed.raw}
    given = parsed.arguments if parsed.arguments is not None else {}
    arguments = given if isinstance(given, str) else _json(given)
    return call | {"function": {"name": parsed.name, "arguments": arguments}}


def _json(value: Any) -> str:
    """Encodes as JSON, readable if it can be sent: half of a surrogate pair, which a model may write, is no
    character."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not any("\ud800" <= each <= "\udfff" for each in text) else json.dumps(value)


def _refusal(error: Exception) -> BadRow:
    return BadRow(f"the chat template refuses the messages: {error}.", "correct the messages.")
