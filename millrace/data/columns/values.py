"""The values of one row of a file. Every error names file, row and column."""

import datetime
import decimal
from collections.abc import Mapping
from typing import Any

from millrace.errors import BadRow, wrong_value
from millrace.validation.kinds import kind_of


class Values:
    """The columns of one raw row, by name or by path in nested objects, `a.b`."""

    def __init__(self, raw: Any, place: str) -> None:
        self._place = place
        if not isinstance(raw, Mapping):
            raise BadRow(f"{place}: is {kind_of(raw)}, not an object.", "write one object with named columns.")
        self._raw = raw

    def bad(self, column: str, reason: str, fix: str) -> BadRow:
        """The error for a column that has no value."""
        return BadRow(f"{self._place}, column {column}: {reason}.", fix)

    def wrong(self, column: str, value: Any, reason: str, fix: str) -> BadRow:
        """The error for a column with a wrong value."""
        return BadRow(wrong_value(f"{self._place}, column {column}", value, reason, fix).what, fix)

    def optional(self, column: str | None) -> Any:
        """The value of a column; None if the row does not have it. Raises BadRow for a path through no object."""
        if column is None or column in self._raw:
            return None if column is None else self._raw[column]
        above, dot, name = column.rpartition(".")
        group = self.optional(above) if dot else None
        if group is not None and not isinstance(group, Mapping):
            raise self.wrong(above, group, "is not an object", "write an object with named fields.")
        return None if group is None else group.get(name)

    def given(self, column: str) -> Any:
        """The value of a column, which may be null if it is there. Raises BadRow if it is missing."""
        above, dot, name = column.rpartition(".")
        group, key = (self.mapping(above), name) if dot and column not in self._raw else (self._raw, column)
        if key not in group:
            raise self.bad(column, "is missing", "add it; null if the reward needs none.")
        return group[key]

    def required(self, column: str) -> Any:
        """The value of a column. Raises BadRow if it is missing or null."""
        value = self.optional(column)
        if value is None:
            raise self.bad(column, "is null" if column in self._raw else "is missing", "give it a value.")
        return value

    def text(self, column: str) -> str:
        """The text in a column. Raises BadRow."""
        value = self.required(column)
        if not isinstance(value, str):
            raise self.wrong(column, value, "is not text", "write text.")
        return value

    def mapping(self, column: str) -> Mapping[str, Any]:
        """The object in a column. Raises BadRow."""
        value = self.required(column)
        if not isinstance(value, Mapping):
            raise self.wrong(column, value, "is not an object", "write an object with named fields.")
        return value

    def plain(self, column: str, value: Any) -> Any:
        """`value` in JSON's types. Parquet also has times, decimals and bytes. Raises BadRow for bytes."""
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, Mapping):
            return {str(k): self.plain(f"{column}.{k}", v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(f"{column}[{place}]", v) for place, v in enumerate(value)]
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, decimal.Decimal):
            return str(value)
        raise self.wrong(column, value, f"is {kind_of(value)}, which JSON cannot hold", "store text or a number.")
