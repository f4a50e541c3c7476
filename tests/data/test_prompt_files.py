"""Rows from Parquet and JSON lines: what is read, what is refused when, and what the error says."""

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.data import PromptRow, PromptSource, open_source
from millrace.data.parquet import ParquetRows, RowGroupCache
from millrace.data.row import write_rows
from millrace.errors import BadRow, InvalidJob


def raw_row(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{number} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train", "tags": ["a", "b"], "deep": {"x": 1.5}},
    }
    return {name: value for name, value in {**row, **changes}.items() if value != "absent"}


def expected(number: int, index: int | None = None) -> PromptRow:
    row = raw_row(number)
    return PromptRow(
        index=number if index is None else index,
        data_source=row["data_source"],
        prompt=row["prompt"],
        ground_truth=row["reward_model"]["ground_truth"],
        reward_style="rule",
        ability="math",
        extra_info=row["extra_info"],
    )


def write_raw(path: Path, rows: list[dict[str, Any]], group: int = 4) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


NAMES = ["train.parquet", "train.jsonl", "train.jsonl.gz"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_plain_python(name: str, tmp_path: Path) -> None:
    source = open_source([write_raw(tmp_path / name, [raw_row(n) for n in range(11)])])
    assert len(source) == 11
    assert list(source) == [expected(n) for n in range(11)]
    assert [source[n] for n in (10, 0, 5)] == [expected(n) for n in (10, 0, 5)]
    assert json.loads(json.dumps(source[3].extra_info)) == source[3].extra_info
    for beyond in (11, -1):
        with pytest.raises(IndexError):
            source[beyond]


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    files = [write_raw(tmp_path / f"{n}{name}", [raw_row(10 * n), raw_row(10 * n + 1)]) for n, name in enumerate(NAMES)]
    source = open_source(files)
    assert [row.index for row in source] == list(range(6))
    assert list(source) == [expected(n, i) for i, n in enumerate([0, 1, 10, 11, 20, 21])]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.jsonl.gz"])
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    messages = [
        PromptRow(n, "demo", [{"role": "user", "content": f"é {n}"}], n, "rule", "math", {"n": n}) for n in (0, 1)
    ]
    assert list(open_source([write_rows(tmp_path / "new" / name, messages)])) == messages
    texts = [PromptRow(0, "demo", "as it is", "x")]
    assert list(open_source([write_rows(tmp_path / name, texts)])) == [
        PromptRow(0, "demo", "as it is", "x", extra_info={"index": 0})
    ]


def test_writing_refuses_what_the_format_cannot_hold(tmp_path: Path) -> None:
    rows = [PromptRow(0, "demo", "a", 1), PromptRow(1, "demo", "b", "one")]
    with pytest.raises(ValueError, match=r"write \.jsonl instead"):
        write_rows(tmp_path / "a.parquet", rows)
    assert [r.ground_truth for r in open_source([write_rows(tmp_path / "a.jsonl", rows)])] == [1, "one"]
    with pytest.raises(ValueError, match="no rows"):
        write_rows(tmp_path / "b.jsonl", [])
    with pytest.raises(ValueError, match="ends neither"):
        write_rows(tmp_path / "b.csv", rows)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


def test_parquet_types_beyond_json_become_plain(tmp_path: Path) -> None:
    row = raw_row(0, extra_info={"day": date(2024, 2, 3), "price": Decimal("1.10")})
    row["reward_model"] = {"style": None, "ground_truth": [1, 2]}
    row["prompt"] = [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "Ada"}]
    read = open_source([write_raw(tmp_path / "a.parquet", [row])])[0]
    assert read.extra_info == {"day": "2024-02-03", "price": "1.10"}
    assert (read.ground_truth, read.reward_style) == ([1, 2], "rule")
    assert read.prompt == [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "Ada"}]


def test_dictionary_and_large_types_are_texts_and_lists_too(tmp_path: Path) -> None:
    message = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    table = pa.table(
        {
            "data_source": pa.array(["a", "b"]).dictionary_encode(),
            "prompt": pa.array([[{"role": "user", "content": "x"}]] * 2, pa.large_list(message)),
            "reward_model": pa.array([{"ground_truth": 1.5}] * 2),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source([tmp_path / "a.parquet"])
    assert source[1] == PromptRow(1, "b", [{"role": "user", "content": "x"}], 1.5)


def test_blank_lines_and_a_byte_order_mark_do_not_count(tmp_path: Path) -> None:
    lines = ["", json.dumps(raw_row(0)), "  ", json.dumps(raw_row(1))]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + b"\xef\xbb\xbf" + "\n".join(lines[1:]).encode())
    assert list(open_source([path])) == [expected(0), expected(1)]


def test_parquet_holds_only_the_row_groups_last_used(tmp_path: Path) -> None:
    path = str(write_raw(tmp_path / "a.parquet", [raw_row(n) for n in range(40)], group=4))
    read: list[int] = []
    cache = RowGroupCache(capacity=1)
    rows = ParquetRows(path, "data.files", cache)
    inner = rows._read
    rows._read = lambda group: (read.append(group), inner(group))[1]  # type: ignore[method-assign]
    for row in (0, 3, 4, 7, 39, 0):
        assert rows.raw(row)["extra_info"]["index"] == row
    assert read == [0, 1, 9, 0]
    assert len(cache._groups) == 1


@pytest.mark.parametrize("name", NAMES)
def test_threads_read_the_same_rows(name: str, tmp_path: Path) -> None:
    source = open_source([write_raw(tmp_path / name, [raw_row(n) for n in range(50)])])
    wrong: list[int] = []

    def read(step: int) -> None:
        wrong.extend(n for n in range(0, 50 * step, step) if source[n % 50] != expected(n % 50))

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, 7, 11, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- what is refused at once -------------------------------------------------------------------------------------


def refusal(path: Path | str) -> str:
    with pytest.raises(InvalidJob) as refused:
        open_source([path])
    assert refused.value.fix
    assert "data.files" in refused.value.what
    return str(refused.value)


def test_paths_that_are_no_data_files(tmp_path: Path) -> None:
    assert f"there is no file {tmp_path / 'no.parquet'}" in refusal(tmp_path / "no.parquet")
    (tmp_path / "folder.parquet").mkdir()
    assert "is a folder" in refusal(tmp_path / "folder.parquet")
    (tmp_path / "a.csv").write_text("a,b")
    assert "not that of a known format" in refusal(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.parquet", b"", "not a Parquet file"),
        ("a.parquet", b"PAR1 and something", "not a Parquet file"),
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b"\n \n", "no rows"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "no rows"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": 1}' * 100, mtime=0)[:-9], "cannot be read"),
        ("a.jsonl", b"[1, 2]\n", "line 1: is a list, not an object"),
        ("a.jsonl", b'\n{"prompt": \n', "line 2: is not JSON"),
        ("a.jsonl", b'{"a": "\xff"}\n', "line 1: is not JSON"),
    ],
)
def test_broken_files(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert reason in message and str(tmp_path / name) in message


def test_an_empty_parquet_file(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([raw_row(0)]).slice(0, 0)
    pq.write_table(table, tmp_path / "a.parquet")
    assert "no rows" in refusal(tmp_path / "a.parquet")


def test_one_bad_file_among_good_ones(tmp_path: Path) -> None:
    good = write_raw(tmp_path / "good.jsonl", [raw_row(0)])
    bad = write_raw(tmp_path / "bad.jsonl", [raw_row(0, prompt="absent")])
    with pytest.raises(InvalidJob, match=r"bad\.jsonl\": has no column prompt or messages; it has data_source"):
        open_source([good, bad])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": "absent"}, "no column prompt or messages; it has data_source"),
        ({"prompt": 3}, "column prompt is int64, neither text nor a list of messages"),
        ({"prompt": ["a", "b"]}, "column prompt is list<element: string>, neither"),
        ({"prompt": [{"role": "user"}]}, "column prompt is list<element: struct<role: string>>, neither"),
        ({"data_source": 3}, "column data_source is int64"),
        ({"reward_model": {"style": "rule"}}, "without ground_truth"),
        ({"reward_model": "rule"}, "column reward_model is string, without ground_truth"),
    ],
)
def test_a_parquet_schema_that_cannot_hold_rows(changes: dict, reason: str, tmp_path: Path) -> None:
    assert reason in refusal(write_raw(tmp_path / "a.parquet", [raw_row(0, **changes)]))


# --- what costs one row ------------------------------------------------------------------------------------------


def bad_row(source: PromptSource, index: int) -> str:
    with pytest.raises(BadRow) as bad:
        source[index]
    assert bad.value.fix
    return bad.value.what


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt": "absent"}, "column prompt: is missing."),
        ({"prompt": None}, "column prompt: is null."),
        ({"prompt": ""}, "column prompt: is empty."),
        ({"prompt": []}, "column prompt: []: is neither text nor a list of messages."),
        ({"prompt": ["hi"]}, 'column prompt[0]: "hi": is not a message.'),
        ({"prompt": [{"role": "user"}]}, "column prompt[0].content: is missing."),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "column prompt[0].content[0]: is an image, and prompts of this job are text only.",
        ),
        ({"data_source": 7}, "column data_source: 7: is not text."),
        ({"reward_model": "rule"}, 'column reward_model: "rule": is not an object.'),
        ({"reward_model": {"style": "rule"}}, "column reward_model.ground_truth: is missing."),
        ({"reward_model": {"style": 1, "ground_truth": 2}}, "column reward_model.style: 1: is not text."),
        ({"extra_info": [1]}, "column extra_info: [1]: is not an object."),
        ({"ability": 5}, "column ability: 5: is not text."),
    ],
)
def test_a_bad_row_is_found_when_it_is_read(changes: dict, complaint: str, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.jsonl", [raw_row(0), raw_row(1, **changes), raw_row(2)])
    source = open_source([path])
    assert f"{path} line 2, {complaint}" in bad_row(source, 1)
    assert source[2] == expected(2)


def test_a_bad_line_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(raw_row(0)) + "\n{oops\n" + "[" * 100_000 + "\n")
    source = open_source([path])
    assert "line 2: is not JSON" in bad_row(source, 1)
    assert "line 3: is not JSON" in bad_row(source, 2)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt": None}, "row 1, column prompt: is null."),
        ({"prompt": [{"role": "user", "content": None}]}, "row 1, column prompt[0].content: null: is not text"),
        ({"reward_model": None}, "row 1, column reward_model: is null."),
        ({"extra_info": {"blob": b"\xff"}}, "is bytes, which JSON cannot hold"),
    ],
)
def test_a_bad_parquet_row_is_found_when_it_is_read(changes: dict, complaint: str, tmp_path: Path) -> None:
    source = open_source([write_raw(tmp_path / "a.parquet", [raw_row(0), raw_row(1, **changes)])])
    assert complaint in bad_row(source, 1)


def test_a_damaged_row_group_costs_its_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [raw_row(n, ability=f"{n}" * 100) for n in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4, compression="snappy")
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    source = open_source([path])
    assert source[3].ability == "3" * 100
    assert "row 5: cannot be read" in bad_row(source, 5)


def test_a_parquet_file_that_is_written_again_costs_its_rows_and_not_the_process(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.parquet", [raw_row(n) for n in range(8)])
    source = open_source([path])
    first = source[3]
    assert str(path) not in Path("/proc/self/maps").read_text(), "reading beyond its end would kill this process"
    path.write_bytes(b"")
    assert source[3] == first
    assert "row 5: cannot be read" in bad_row(source, 5)


def test_files_or_a_procedural_source_but_not_both() -> None:
    for files, procedural in (([], None), (["a.jsonl"], "reasoning_gym:spell_backward")):
        with pytest.raises(InvalidJob, match=r"(both files and|neither files nor) a "):
            open_source(files, procedural)


def test_opening_files_needs_no_torch(tmp_path: Path, project_python: Callable[[str], None]) -> None:
    path = write_raw(tmp_path / "a.parquet", [raw_row(0)])
    project_python(
        f"import sys; from millrace.data import open_source; assert len(open_source([{str(path)!r}])) == 1\n"
        "import millrace.data.model_folder, millrace.data.row\n"
        "heavy = {'torch', 'transformers', 'reasoning_gym', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )


@pytest.fixture
def project_python() -> Callable[[str], None]:
    def run(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    return run
