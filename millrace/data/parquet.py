"""Parquet files: mapped into memory, with the row groups that were used last kept decoded."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.data.row import COLUMNS, REQUIRED
from millrace.errors import BadRow, refused

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


class ParquetRows:
    """The rows of one Parquet file. See `RowFile`."""

    def __init__(self, path: str, field: str, cache: RowGroupCache) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise refused(field, path, f"is not a Parquet file: {error}", "write the file again.") from error
        _check_schema(self._file.schema_arrow, path, field)
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)))
        self._columns = [name for name in COLUMNS if name in self._file.schema_arrow.names]
        self._cache = cache

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def raw(self, row: int) -> Any:
        """See `RowFile.raw`."""
        group = bisect_right(self._ends, row)
        start = self._ends[group - 1] if group else 0
        try:
            table = self._cache.get(self._path, group, self._read)
            return table.slice(row - start, 1).to_pylist()[0]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise BadRow(f"{self.place(row)}: cannot be read: {error}.", "write the file again.") from error

    def scan(self) -> Iterator[Any | BadRow]:
        """See `RowFile.scan`. Reads in batches; after a batch that cannot be read, the rest row by row."""
        read = 0
        try:
            for batch in self._file.iter_batches(ROWS_AT_ONCE, columns=self._columns, use_threads=False):
                rows = batch.to_pylist()
                read += len(rows)
                yield from rows
        except (pa.ArrowException, OSError, ValueError):
            for row in range(read, len(self)):
                try:
                    yield self.raw(row)
                except BadRow as error:
                    yield error

    def place(self, row: int) -> str:
        """See `RowFile.place`."""
        return f"{self._path} row {row}"

    def _read(self, group: int) -> pa.Table:
        return self._file.read_row_group(group, columns=self._columns, use_threads=False)


def _check_schema(schema: pa.Schema, path: str, field: str) -> None:
    """Raises InvalidJob for a column that is missing or has a type that no valid row can have."""
    if missing := [name for name in REQUIRED if name not in schema.names]:
        found = f"has no column {', '.join(missing)}; it has {', '.join(schema.names)}"
        raise refused(field, path, found, "write verl's columns: data_source, prompt, reward_model, extra_info.")
    prompt, reward_model = schema.field("prompt").type, schema.field("reward_model").type
    if not _is_text(schema.field("data_source").type):
        kind = schema.field("data_source").type
        raise refused(field, path, f"column data_source is {kind}, not text", "write text.")
    if not (_is_text(prompt) or _is_messages(prompt)):
        fix = "write text, or a list of messages {role, content}."
        raise refused(field, path, f"column prompt is {prompt}, neither text nor a list of messages", fix)
    if not _has_fields(reward_model, ("ground_truth",)):
        fix = "write an object {style, ground_truth}."
        raise refused(field, path, f"column reward_model is {reward_model}, without ground_truth", fix)


def _is_text(kind: pa.DataType) -> bool:
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
