"""Whether judges can be asked: their templates and patterns, without a request."""

import re
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import Mistake, wrong_value
from millrace.rewards import judge_template as template
from millrace.spec.judge import JudgeTerm

LARGEST_TEMPLATE = 1 << 20
"""Bytes of a file with a template."""


def mistakes_of(term: JudgeTerm) -> Iterator[Mistake]:
    """What is wrong with a judge on this machine."""
    judge = term.judge
    named, text = ("prompt", judge.prompt) if judge.prompt is not None else ("prompt_file", None)
    field, value = f"{term.field}.{named}", judge.prompt if named == "prompt" else judge.prompt_file
    if text is None:
        try:
            with Path(judge.prompt_file or "").open("rb") as file:
                text = file.read(LARGEST_TEMPLATE + 1).decode()
            if len(text) > LARGEST_TEMPLATE:
                raise ValueError(f"more than {LARGEST_TEMPLATE} bytes")
        except (OSError, ValueError) as error:
            fix = "give the absolute path of a text file, which every replica's host has too."
            yield wrong_value(field, value, f"cannot be read: {getattr(error, 'strerror', None) or error}", fix)
    if text is not None:
        try:
            template.check(text, term.scope)
        except ValueError as error:
            yield wrong_value(field, value, str(error), "correct the template.")
    try:
        re.compile(judge.pattern)
    except re.error as error:
        reason = f"is not a regular expression: {error}"
        yield wrong_value(f"{term.field}.pattern", judge.pattern, reason, "correct it.")
