"""Parquet files, with the row groups that were used last kept decoded."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.data.columns.layout import VERL_TRUTH, Layout
from millrace.data.prompt_source import RowFile
from millrace.errors import BadRow, InvalidJob, Mistake, refused, wrong_value

CACHE_BYTES = 256 << 20
ROWS_AT_ONCE = 1024


class RowGroupCache:
    """The row groups that were used last, over all files of a source: as many as fit into `capacity` bytes, at least
    one."""

    def __init__(self, capacity: int = CACHE_BYTES) -> None:
        self._capacity = capacity
        self._groups: OrderedDict[tuple[str, int], pa.Table] = OrderedDict()
        self._bytes = 0
        self._using = threading.Lock()

    def get(self, path: str, group: int, read: Callable[[int], pa.Table]) -> pa.Table:
        """Row group `group` of the file `path`, read with `read` if it is not in the cache."""
        with self._using:
            if (path, group) in self._groups:
                self._groups.move_to_end((path, group))
                return self._groups[path, group]
            table = self._groups[path, group] = read(group)
            self._bytes += table.nbytes
            while self._bytes > self._capacity and len(self._groups) > 1:
                self._bytes -= self._groups.popitem(last=False)[1].nbytes
            return table


class ParquetRows(RowFile):
    """The rows of one Parquet file."""

    def __init__(self, path: str, field: str, cache: RowGroupCache) -> None:
        self._path, self._field = path, field
        try:
            # Not mapped into memory: reading a mapped file that somebody cuts kills the process with SIGBUS.
            self._file = pq.ParquetFile(path, memory_map=False)
        except (pa.ArrowException, OSError) as error:
            raise refused(field, path, f"is not a Parquet file: {error}", "write the file again.") from error
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)))
        self._columns = list(self._file.schema_arrow.names)
        self._cache = cache

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def columns(self) -> Sequence[str]:
        return list(self._file.schema_arrow.names)

    def fitted(self, layout: Layout) -> Layout:
        """Only the columns of the layout are read."""
        schema = self._file.schema_arrow
        if mistakes := list(_mistakes(schema, layout, self._path, self._field)):
            raise InvalidJob.of(mistakes)
        layout = layout.without([name for name in layout.others if _has_bytes(schema.field(name).type)])
        self._columns = [name for name in schema.names if name in layout.read_columns]
        return layout

    def raw(self, row: int) -> Any:
        group = bisect_right(self._ends, row)
        start = self._ends[group - 1] if group else 0
        try:
            table = self._cache.get(self._path, group, self._read)
            return table.slice(row - start, 1).to_pylist()[0]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise BadRow(f"{self.place(row)}: cannot be read: {error}.", "write the file again.") from error

    def scan(self) -> Iterator[Any | BadRow]:
        """Reads in batches from the beginning; after a batch that cannot be read, the rest row by row."""
        read = 0
        try:
            for batch in self._file.iter_batches(ROWS_AT_ONCE, columns=self._columns, use_threads=False):
                rows = batch.to_pylist()
                read += len(rows)
                yield from rows
        except (pa.ArrowException, OSError, ValueError):
            yield from self._one_by_one(read)

    def place(self, row: int) -> str:
        return f"{self._path} row {row}"

    def _read(self, group: int) -> pa.Table:
        return self._file.read_row_group(group, columns=self._columns, use_threads=False)


def _mistakes(schema: pa.Schema, layout: Layout, path: str, field: str) -> Iterator[Mistake]:
    """The columns of a type that no valid row can have."""
    prompt = _type(schema, layout.prompt)
    if prompt is None or not (_is_text(prompt) or _is_messages(prompt)):
        fix = "write text, or a list of messages {role, content}."
        found = f"column {layout.prompt} is {prompt}, neither text nor a list of messages"
        yield wrong_value(field, path, found, fix)
    if layout.data_source is not None and not _is_text(kind := _type(schema, layout.data_source)):
        yield wrong_value(field, path, f"column {layout.data_source} is {kind}, not text", "write text.")
    truth = layout.ground_truth
    if truth is not None and _type(schema, truth) is None:
        above, _, name = truth.rpartition(".")
        fix = "write an object {style, ground_truth}." if truth == VERL_TRUTH else "name a field that it has."
        yield wrong_value(field, path, f"column {above} is {_type(schema, above)}, without {name}", fix)


def _type(schema: pa.Schema, column: str) -> pa.DataType | None:
    """The type of a column or, by a path with dots, of a field in it; None if there is none."""
    if column in schema.names:
        return schema.field(column).type
    above, dot, name = column.rpartition(".")
    kind = _type(schema, above) if dot else None
    return kind.field(name).type if kind is not None and _has_fields(kind, (name,)) else None


def _has_bytes(kind: pa.DataType) -> bool:
    """Whether values of the type hold bytes, which JSON cannot hold."""
    inner = [kind.field(place).type for place in range(kind.num_fields)]
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(check(kind) for check in checks) or any(map(_has_bytes, inner))


def _is_text(kind: pa.DataType | None) -> bool:
    if kind is None:
        return False
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_messages(kind: pa.DataType) -> bool:
    is_list: bool = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and _has_fields(kind.value_type, ("role", "content"))


def _has_fields(kind: pa.DataType, names: tuple[str, ...]) -> bool:
    if not pa.types.is_struct(kind):
        return False
    have: set[str] = {kind.field(place).name for place in range(kind.num_fields)}
    return set(names) <= have
