"""Rows in the columns of TRL, OpenAI and one's own: what is taken for what, what is said about it, what is refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.data import PromptRow, PromptSource, Reading, open_source
from millrace.errors import BadRow, InvalidJob
from millrace.hub import matching

USER = {"role": "user", "content": "1 + 1?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def answer(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, **reading: Any) -> PromptSource:
    return open_source([path], reading=Reading(**reading))


def refusal(path: Path, **reading: Any) -> str:
    with pytest.raises(InvalidJob) as error:
        opened(path, **reading)
    return str(error.value)


SHAPES = [
    ({"prompt": "1 + 1?", "solution": "2"}, ("1 + 1?", "2", {}), "ground truth from solution"),
    ({"prompt": [USER], "answer": 2, "level": "easy"}, ([USER], 2, {"level": "easy"}), "other columns: level"),
    ({"prompt": "1 +", "completion": " 1 = 2"}, ("1 +", " 1 = 2", {}), "ground truth from completion"),
    ({"prompt": [USER], "completion": [answer("2")]}, ([USER], "2", {}), "ground truth from completion"),
    ({"messages": [SYSTEM, USER, answer("2")]}, ([SYSTEM, USER], "2", {}), "ground truth from that answer"),
    ({"messages": [USER]}, ([USER], None, {}), "prompt from messages"),
    ({"messages": [USER, answer("two")], "solution": "2"}, ([USER], "2", {}), "ground truth from solution"),
]


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
@pytest.mark.parametrize(("row", "read", "said"), SHAPES)
def test_columns_of_trl_and_openai_are_found(
    name: str, row: dict[str, Any], read: tuple[Any, Any, Any], said: str, tmp_path: Path
) -> None:
    source = opened(written(tmp_path / name, row, row))
    prompt, truth, extra_info = read
    assert source[1] == PromptRow(1, "train", prompt, truth, extra_info=extra_info)
    assert said in source.description[0] and str(tmp_path / name) in source.description[0]


def test_a_prompt_may_end_with_the_beginning_of_an_answer(tmp_path: Path) -> None:
    begun = [USER, answer("The sum is")]
    assert opened(written(tmp_path / "a.jsonl", {"prompt": begun, "solution": "2"}))[0].prompt == begun


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_a_job_says_which_column_is_what(name: str, tmp_path: Path) -> None:
    row = {"question": "1 + 1?", "result": {"answer": "2", "steps": 1}, "set": "sums", "meta": {"n": 1}, "x": 0}
    columns = {"prompt": "question", "ground_truth": "result.answer", "data_source": "set", "extra_info": "meta"}
    source = opened(written(tmp_path / name, row), columns=columns)
    assert source[0] == PromptRow(0, "sums", "1 + 1?", "2", extra_info={"n": 1})
    said = "prompt from question (without a last answer of the assistant), ground truth from result.answer, data_source"
    assert said in source.description[0]


def test_every_missing_column_is_told_at_once_with_those_found(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"question": "1 + 1?", "solution": "2", "answer": "2"})
    told = refusal(path, columns={"prompt": "problem", "data_source": "set"})
    for part in (
        'data.columns.prompt: "problem": ',
        'data.columns.data_source: "set": ',
        "it has question, solution, answer",
        "columns solution and answer, and each could be the ground truth",
    ):
        assert part in told
    assert "data.columns: {prompt: question}" in refusal(path)


def test_the_mistakes_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{name}.jsonl", {name: "1"}) for name in ("first", "second")]
    with pytest.raises(InvalidJob) as error:
        open_source(files)
    assert "it has first" in str(error.value) and "it has second" in str(error.value)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_parts_of_text_and_calls_of_tools(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]
    conversation = [
        {"role": "user", "content": parts},
        answer(None, tool_calls=[CALL]),
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    read = opened(written(tmp_path / "a.jsonl", {"messages": conversation}))[0].prompt
    assert read[0] == USER and read[2] == conversation[2]
    assert read[1] == answer(None, tool_calls=[{**CALL, "function": {"name": "add", "arguments": {"a": 1}}}])
    asked = opened(written(tmp_path / "b.jsonl", {"messages": [USER, answer(None, tool_calls=[CALL])]}))[0]
    assert asked.ground_truth[0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (answer(None), "content: null: is not text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "is an image, and prompts of this job are text only",
        ),
        (answer(None, tool_calls=[{**CALL, "function": {"name": "add", "arguments": "[1"}}]), "is not a JSON object"),
        (answer(None, tool_calls="add"), "is not a list of calls"),
    ],
)
def test_messages_that_cannot_be_read(message: dict[str, Any], told: str, tmp_path: Path) -> None:
    source = opened(written(tmp_path / "a.jsonl", {"messages": [USER]}, {"messages": [USER, message, USER]}))
    with pytest.raises(BadRow, match=r"line 2, column messages\[1\]") as bad:
        source[1]
    assert told in bad.value.what


def test_columns_of_bytes_are_left_out_of_extra_info(tmp_path: Path) -> None:
    row = {"prompt": "a", "solution": "b", "image": {"bytes": b"\xff"}, "level": 1}
    source = opened(written(tmp_path / "a.parquet", row))
    assert source[0].extra_info == {"level": 1} and "image" not in source.description[0]


def test_the_job_chooses_between_chat_and_text(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain.jsonl", {"prompt": "1 + 1?", "solution": "2"})
    chat = written(tmp_path / "chat.jsonl", {"prompt": [SYSTEM, USER], "solution": "2"})
    assert opened(plain)[0].prompt == "1 + 1?" and opened(chat)[0].prompt == [SYSTEM, USER]
    assert "without a chat template; data.prompt_format: chat" in opened(plain).description[1]
    assert opened(plain, prompt_format="chat")[0].prompt == [USER]
    assert opened(chat, prompt_format="text")[0].prompt == "Be brief.\n\n1 + 1?"
    assert len(opened(plain, prompt_format="chat").description) == len(opened(chat).description) == 1


ROWS = [{"prompt": f"{n}", "solution": "\u00e9"} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(content: bytes) -> bytes:
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(content)
    return bytes(packed.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps(ROWS, indent=1, ensure_ascii=False).encode()),
        ("a.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("a.json", LINES),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.jsonl.zst", zstd(LINES)),
        ("a.json.zst", zstd(json.dumps(ROWS).encode())),
    ],
)
def test_forms_of_json(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    source = opened(tmp_path / name)
    assert [(row.prompt, row.ground_truth, row.data_source) for row in source] == [
        (str(n), "\u00e9", "a") for n in range(3)
    ]
    assert source[2].prompt == "2"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", b"[]", "no rows"),
        ("a.json", b'[{"prompt": "a"}', "is not a JSON array"),
        ("a.json", b'[{"prompt": "a"}] {}', "is not a JSON array"),
        ("a.json", b"[1]", "element 1: is a whole number, not an object"),
        ("a.json", b'{\n"prompt": "a"}', "one array of objects"),
        ("a.jsonl.zst", b"not zstd", "cannot be read"),
    ],
)
def test_broken_forms_of_json(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert told in refusal(tmp_path / name)


def test_a_pattern_stands_for_the_files_that_match(tmp_path: Path) -> None:
    files = [str(written(tmp_path / f"train-0000{n}-of-00002.jsonl", ROWS[n])) for n in (1, 0)]
    (tmp_path / "train-folder.jsonl").mkdir()
    assert matching(f"{tmp_path}/train-*.jsonl", "data.files") == sorted(files)
    odd = written(tmp_path / "[odd].jsonl", ROWS[0])
    assert matching(str(odd), "data.files") == [str(odd)]
    with pytest.raises(InvalidJob, match="no file matches"):
        matching(f"{tmp_path}/test-*.jsonl", "data.files")
    source = open_source(files)
    assert {row.data_source for row in source} == {"train"} and "and 1 more: " in source.description[0]
