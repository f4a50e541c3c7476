"""The data sets, and their conversion to `train.parquet` and `test.parquet` in verl's columns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace import hub
from millrace.data import PromptRow
from millrace.data.row import write_rows
from millrace.errors import InvalidJob, MillraceError
from recipes import dapo_math, geometry3k, gsm8k


@dataclass(frozen=True)
class DataSet:
    """Where a data set is, and how a file of it is read."""

    train: str
    """Name of the file on the Hugging Face hub."""
    test: str
    rows: Callable[[str], Iterator[PromptRow]]
    """The rows of a file on this machine."""


DATA_SETS = {
    "gsm8k": DataSet(gsm8k.TRAIN, gsm8k.TEST, gsm8k.rows),
    "dapo-math": DataSet(dapo_math.TRAIN, dapo_math.TEST, dapo_math.rows),
    "geometry3k": DataSet(geometry3k.TRAIN, geometry3k.TEST, geometry3k.rows),
}


def data_set(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise InvalidJob(f"there is no data set {name!r}.", f"choose one of {', '.join(DATA_SETS)}.")
    return DATA_SETS[name]


def converted(source: str, rows: Callable[[str], Iterator[PromptRow]], target: Path) -> int:
    """Converts the file `source`, a path or a name on the hub, to `target`. Returns the number of rows written.

    Raises InvalidJob for a source that cannot be used, Unavailable where the hub does not answer, BadRow for a row that
    cannot be converted, and MillraceError for a file without rows. `target` is written whole or not at all.
    """
    read = list(rows(hub.file_here(source, "source")))
    if not read:
        raise MillraceError(f"source: {source}: has no rows.", "download the file again.")
    write_rows(target, read)
    return len(read)
