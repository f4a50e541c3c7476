"""HTML as a tree of elements. Text of users and models can only become text: it is escaped when the tree is written."""

import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

Element = ElementTree.Element
Part = Element | str

INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
"""Control characters but tab and line feed, halves of surrogate pairs, and marks that change the direction of text."""


def visible(text: str) -> str:
    """The text with every INVISIBLE character written as `\\x1b` or `\\u202e`, as Python writes it."""
    return INVISIBLE.sub(lambda found: found[0].encode("unicode_escape", "backslashreplace").decode(), text)


def element(tag: str, *parts: Part, **attributes: str) -> Element:
    """An element with texts and elements in it. `class_` is the attribute `class`, `view_box` is `viewBox`."""
    names = {"class_": "class", "view_box": "viewBox"}
    made = Element(tag, {names.get(name, name.replace("_", "-")): visible(value) for name, value in attributes.items()})
    for part in parts:
        if not isinstance(part, str):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + visible(part)
        else:
            made.text = (made.text or "") + visible(part)
    return made


def table(columns: Sequence[str], rows: Iterable[Sequence[Part]], **attributes: str) -> Element:
    """A table. Cells of a column whose name begins with > are aligned to the right."""
    aligned = ["right" if column.startswith(">") else "left" for column in columns]
    head = element("tr", *(element("th", c.removeprefix(">"), class_=a) for c, a in zip(columns, aligned, strict=True)))
    body = [
        element("tr", *(element("td", cell, class_=a) for cell, a in zip(row, aligned, strict=True))) for row in rows
    ]
    whole = element("table", element("thead", head), element("tbody", *body), **attributes)
    return element("div", whole, class_="scroll")


def section(heading: str, *parts: Part) -> Element:
    return element("section", element("h2", heading), *parts)


def details(summary: str, *parts: Part) -> Element:
    """Parts that are folded away until somebody opens them."""
    return element("details", element("summary", summary), *parts)


def document(title: str, style: str, body: Sequence[Part]) -> str:
    """A whole page. A Content-Security-Policy forbids scripts and external resources."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", **{"http-equiv": "Content-Security-Policy"}, content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", style),
    )
    whole = element("html", head, element("body", element("main", *body)), lang="en")
    return "<!DOCTYPE html>\n" + ElementTree.tostring(whole, encoding="unicode", method="html") + "\n"
