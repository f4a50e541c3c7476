"""Writes rows in verl's columns, as Parquet or JSON lines; `open_source` reads them back."""

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from millrace.data.row import PromptRow


def write_rows(path: str | Path, rows: Iterable[PromptRow]) -> Path:
    """Writes `rows` to `path` in the format of its ending: .parquet, .jsonl or .jsonl.gz. The file appears once it is
    complete. Returns `path`.

    Raises ValueError for another ending, for no rows, and for rows that do not fit into the columns of one Parquet
    file, such as ground truths of several types; JSON lines can hold those.
    """
    path = Path(path)
    columns = [_columns(row) for row in rows]
    if not columns:
        raise ValueError(f"there are no rows to write to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.name.endswith(".parquet"):
            _write_parquet(part, columns)
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in columns).encode()
            part.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
        else:
            raise ValueError(f"the name of {path} ends neither in .parquet nor in .jsonl or .jsonl.gz")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _columns(row: PromptRow) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "prompt": row.prompt,
        "ability": row.ability,
        "reward_model": {"style": row.reward_style, "ground_truth": row.ground_truth},
        # Parquet cannot store an object without fields.
        "extra_info": row.extra_info or {"index": row.index},
    }


def _write_parquet(path: Path, columns: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pa.Table.from_pylist(columns)
    except pa.ArrowException as error:
        raise ValueError(f"the rows do not fit into one Parquet table: {error}; write .jsonl instead") from error
    pq.write_table(table, path)
