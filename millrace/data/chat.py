"""From a row to the tokens of its prompt: the chat template, and what happens to a prompt that is too long."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from jinja2 import TemplateError

from millrace.data.pictures import Pictures
from millrace.data.row import PromptRow
from millrace.drops import Drop, DropReason
from millrace.errors import BadRow

Overlong = Literal["drop", "truncate_left", "truncate_right", "truncate_middle"]


class Tokenizer(Protocol):
    """The two methods of a Hugging Face tokenizer that are used."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Rendered:
    """A prompt as tokens."""

    token_ids: list[int]
    """Empty if the prompt is dropped."""
    dropped: Drop | None = None
    """Why the prompt is dropped; None if it is not."""
    cut: int = 0
    """Number of tokens that were cut off."""
    images: tuple[Any, ...] = ()
    """The images of the prompt, opened."""
    short_ids: tuple[int, ...] = ()
    """The tokens with one for each image; empty if there are no images."""


def render(
    row: PromptRow,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    overlong: Overlong = "drop",
    chat_template_options: Mapping[str, Any] | None = None,
    pictures: Pictures | None = None,
) -> Rendered:
    """The tokens of `row`'s prompt, at most `max_tokens`, after which the answer begins.

    Messages go through the chat template with `chat_template_options`, plain text is encoded as it is. `truncate_left`
    cuts at the beginning, `truncate_right` at the end, `truncate_middle` in the middle. `pictures` takes the images of
    rows that have some: such a prompt has as many tokens for each as the model sees of it, and is never cut. Raises
    BadRow if the tokenizer or its template refuses the row, or an image cannot be used.
    """
    most = max_tokens if overlong == "drop" else None
    token_ids = _tokens(row, tokenizer, chat_template_options or {}, most)
    if isinstance(token_ids, Drop):
        return Rendered([], dropped=token_ids)
    if not token_ids:
        raise BadRow(f"row {row.index} of {row.data_source} has an empty prompt.", "fix the prompt or the template.")
    if pictures is None:
        return fit(token_ids, max_tokens, overlong)
    label = f"row {row.index} of {row.data_source}"
    images = pictures.opened(row.images, label)
    found = fit(pictures.expanded(token_ids, images, label), max_tokens, "drop" if images else overlong)
    return replace(found, images=tuple(images), short_ids=tuple(token_ids)) if images else found


def fit(token_ids: list[int], max_tokens: int, overlong: Overlong) -> Rendered:
    """`token_ids` if they fit, otherwise cut or dropped."""
    cut = len(token_ids) - max_tokens
    if cut <= 0:
        return Rendered(token_ids)
    if overlong == "drop":
        return Rendered([], dropped=Drop(DropReason.PROMPT_TOO_LONG, f"{len(token_ids)} > {max_tokens} tokens"))
    if overlong == "truncate_left":
        return Rendered(token_ids[cut:], cut=cut)
    if overlong == "truncate_right":
        return Rendered(token_ids[:max_tokens], cut=cut)
    head = max_tokens // 2
    return Rendered(token_ids[:head] + token_ids[head + cut :], cut=cut)


def _tokens(row: PromptRow, tokenizer: Tokenizer, options: Mapping[str, Any], most: int | None) -> list[int] | Drop:
    """The row's tokens. A prompt that certainly has more than `most` is dropped without the rest of its text."""
    arguments = {"add_generation_prompt": True, **options}
    try:
        if most is not None and _characters(row.prompt) > _first_part(most):
            text = row.prompt
            if not isinstance(text, str):
                text = tokenizer.apply_chat_template(text, **arguments, tokenize=False)
            if isinstance(text, str) and _certainly_longer(text, tokenizer, most):
                return Drop(DropReason.PROMPT_TOO_LONG, f"more than {most} tokens: {len(text)} characters")
        if isinstance(row.prompt, str):
            return list(tokenizer.encode(row.prompt))
        return list(tokenizer.apply_chat_template(row.prompt, **arguments, tokenize=True, return_dict=False))
    except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise BadRow(
            f"row {row.index} of {row.data_source}: the tokenizer refuses it: {error}.",
            "correct the row's messages, data.chat_template_options, or the model's chat template.",
        ) from error


def _first_part(most: int) -> int:
    """Characters of a long text that are encoded first, to see whether they alone have more than `most` tokens."""
    return 16 * most + 4096


def _characters(prompt: Any) -> int:
    """Characters in all texts of a prompt."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Mapping):
        return sum(map(_characters, prompt.values()))
    return sum(map(_characters, prompt)) if isinstance(prompt, Sequence) else 0


def _certainly_longer(text: str, tokenizer: Tokenizer, most: int) -> bool:
    """Whether a beginning of the text has more than twice `most` tokens. Where it is cut, some tokens are not those of
    the whole text, but far fewer than `most`. A tokenizer takes minutes for tens of megabytes."""
    part = _first_part(most)
    while 2 * part < len(text):
        if len(tokenizer.encode(text[:part])) > 2 * most:
            return True
        part *= 2
    return False
