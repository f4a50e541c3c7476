"""The text that a judge gets: a template with `{{answer}}` and the like."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.rewards.term import Scope

PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
SHARED = ("prompt", "ground_truth")
PLACES: Mapping[Scope, tuple[str, ...]] = {
    "answer": ("answer", "conversation", *SHARED),
    "group": ("answers", "conversations", *SHARED),
}
"""What a template may name, by the scope of its judge."""


def check(template: str, scope: Scope) -> None:
    """Raises ValueError for a template that names something that does not exist, or that does not show what is to be
    scored."""
    named, known = PLACE.findall(template), PLACES[scope]
    if unknown := [name for name in named if name not in known]:
        raise ValueError(f"{{{{{unknown[0]}}}}} is not known with scope: {scope}; there are {_listed(known)}")
    if not set(named) & set(known[:2]):
        raise ValueError(f"it shows no answer: write {_listed(known[:2])} where the judge is to see it")


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its places filled. What is filled in is not looked at again."""
    return PLACE.sub(lambda match: values[match[1]], template)


def text_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as text: the content of its only message, or each message after its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return _content(prompt[0])
    return "\n\n".join(f"{message.get('role')}: {_content(message)}" for message in prompt)


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message; images in it are only named."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(part.get("text", f"[{part.get('type')}]") for part in content)
    return str(content)


def numbered(texts: Sequence[str]) -> str:
    """Several answers as one text, each after its number."""
    return "\n\n".join(f"Answer {number}:\n{text}" for number, text in enumerate(texts, start=1))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{{{{{name}}}}}" for name in names)
