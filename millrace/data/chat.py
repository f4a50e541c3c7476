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


OF_THE_BEGINNING = ("drop", "truncate_right")
"""For these the beginning of a prompt says enough if it is too long alone."""


class Tokenizer(Protocol):
    """The two methods of a Hugging Face tokenizer that are used."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Rendered:
    """A prompt as tokens."""

    token_ids: list[int]
    """Empty if the prompt is dropped."""
    dropped: Drop | None = None
    """Why the prompt is dropped; None if it is not."""
    cut: int = 0
    """Number of tokens that were cut off; of a huge prompt cut at the end, of those that were looked at."""
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
    whole = pictures is not None and bool(row.images)  # images are found by their tokens, and such a prompt is not cut
    most = max_tokens if overlong in OF_THE_BEGINNING and not whole else None
    token_ids = _tokens(row, tokenizer, chat_template_options or {}, most)
    if isinstance(token_ids, _Beginning):
        if overlong == "drop":
            reason = f"more than {max_tokens} tokens: {token_ids.characters} characters"
            return Rendered([], dropped=Drop(DropReason.PROMPT_TOO_LONG, reason))
        token_ids = token_ids.token_ids
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


@dataclass(frozen=True)
class _Beginning:
    """The tokens of a beginning of a text that certainly has more than a bound."""

    token_ids: list[int]
    characters: int
    """Number of characters of the whole text."""


def _tokens(
    row: PromptRow, tokenizer: Tokenizer, options: Mapping[str, Any], most: int | None
) -> list[int] | _Beginning:
    """The row's tokens. Of a prompt that certainly has more than `most` only a beginning with more than `most`."""
    arguments = {"add_generation_prompt": True, **options}
    try:
        if most is not None and _characters(row.prompt) > _first_part(most):
            text, special = row.prompt, isinstance(row.prompt, str)
            if not special:
                text = tokenizer.apply_chat_template(text, **arguments, tokenize=False)
            if isinstance(text, str) and (beginning := _long_beginning(text, tokenizer, most, special)) is not None:
                return _Beginning(beginning, len(text))
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


def _long_beginning(text: str, tokenizer: Tokenizer, most: int, special: bool) -> list[int] | None:
    """The tokens of a beginning of the text that has more than twice `most`; None if there is none. Where it is cut,
    some tokens are not those of the whole text, but far fewer than `most`. A tokenizer takes minutes for tens of
    megabytes. `special`: with the tokens that the tokenizer adds to a plain text."""
    part = _first_part(most)
    while 2 * part < len(text):
        if len(tokens := tokenizer.encode(text[:part], add_special_tokens=special)) > 2 * most:
            return tokens
        part *= 2
    return None
