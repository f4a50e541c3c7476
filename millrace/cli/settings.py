"""`--set FIELD=VALUE`: new values of fields of a job spec on the command line."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from millrace.errors import InvalidJob, Mistake

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="New value of a field of the job spec, for example trainer.token_budget=8192. Can be repeated.",
    ),
]


def changes_of(settings: Sequence[str] | None) -> dict[str, Any]:
    """`a.b=1` as {"a": {"b": 1}}; values are YAML. Raises InvalidJob."""
    from millrace.spec.document import UNREADABLE, Document

    tree: dict[str, Any] = {}
    for setting in settings or ():
        path, given, value = setting.partition("=")
        *above, name = path.split(".")
        if not given or not all((*above, name)):
            raise _wrong_setting(setting, "has no field and value", "write it as trainer.token_budget=8192.")
        try:
            read = Document(value).tree
        except UNREADABLE as error:
            raise _wrong_setting(setting, f"the value is not YAML: {error}", "put the value in quotes.") from error
        group = tree
        for part in above:
            group = group.setdefault(part, {})
            if not isinstance(group, dict):
                raise _wrong_setting(setting, f"{part} has a value already", "give the group or its fields, not both.")
        group[name] = read
    return tree


def _wrong_setting(setting: str, reason: str, fix: str) -> InvalidJob:
    return InvalidJob.of([Mistake("--set", reason, fix, setting)])
