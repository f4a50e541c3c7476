"""Rows with images: how files name them, what a job allows, and what of them costs a row."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.data import PromptRow, Reading, open_source
from millrace.data.chat import render
from millrace.data.pictures import Pictures, check_takes_images
from millrace.data.row import write_rows
from millrace.errors import BadRow, InvalidJob
from millrace.rewards.judge_template import text_of
from millrace.validation.places import ROOTS
from tests.image_models import PAD, picture, save_image_model
from tests.models import byte_tokenizer

FILE, OTHER = picture(1, 60, 40), picture(2, 30, 90, "JPEG")
URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
SHOWN: list[dict[str, Any]] = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": "?"}]


def source_of(path: Path, most: int | None = 2) -> Any:
    return open_source([path], reading=Reading(most_images=most))


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(content: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], "ground_truth": "x"}


@pytest.mark.parametrize("value", [FILE, {"bytes": FILE, "path": "a.png"}], ids=["bytes", "struct"])
def test_verls_column_in_parquet(value: Any, tmp_path: Path) -> None:
    rows = [{**asked("See <image>?"), "images": [value]}, {**asked("No image."), "images": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = source_of(tmp_path / "a.parquet")
    assert first.images == (FILE,) and first.prompt == [{"role": "user", "content": SHOWN}]
    assert first.question == "See ?"
    assert second.images == () and second.prompt == [{"role": "user", "content": "No image."}]
    assert "images" not in first.extra_info


def test_parts_of_openai(tmp_path: Path) -> None:
    (tmp_path / "b.jpg").write_bytes(OTHER)
    parts = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "or"}]
    parts += [{"type": "input_image", "image_url": str(tmp_path / "b.jpg")}]
    (row,) = source_of(lines(tmp_path / "a.jsonl", asked(parts)))
    assert row.images == (FILE, OTHER)
    assert row.prompt[0]["content"] == [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    row = PromptRow(0, "d", [{"role": "user", "content": SHOWN}], "x", extra_info={"n": 1}, images=(FILE,))
    plain = PromptRow(0, "d", [{"role": "user", "content": "no image"}], "x", extra_info={"n": 0})
    row = replace(row, index=1)
    for name in ("a.parquet", "a.jsonl"):
        assert list(source_of(write_rows(tmp_path / name, [plain, row]))) == [plain, row]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({**asked("<image> <image>"), "images": [URL]}, "images: has fewer images than the prompt has places"),
        ({**asked("nothing"), "images": [URL]}, "images: has 1 more image than the prompt has places"),
        ({**asked("<image>" * 3), "images": [URL] * 3}, r"images\[2\]: is image 3 of the prompt, which may have 2"),
        ({**asked("<image>"), "images": ["https://a/b.png"]}, "is an address, and nothing is downloaded"),
        ({**asked("<image>"), "images": ["b.png"]}, "is neither a data URL nor an absolute path"),
        ({**asked("<image>"), "images": ["data:image/png;base64,?"]}, "is not a data URL in base64"),
        ({**asked("<image>"), "images": ["/nowhere/a.png"]}, "cannot be read: No such file"),
        ({**asked("<image>"), "images": [7]}, "is not an image"),
        ({**asked("<image>"), "images": URL}, "is not a list of images"),
        ({**asked([{"type": "image"}]), "images": []}, "has fewer images than the prompt has places"),
        ({**asked("<image>"), "images": ["file:///a.png"]}, "is an address"),
    ],
)
def test_a_row_that_cannot_be_used(row: dict[str, Any], told: str, tmp_path: Path) -> None:
    source = source_of(lines(tmp_path / "a.jsonl", {**asked("fine"), "images": []}, row))
    assert source[0].images == ()
    with pytest.raises(BadRow, match=rf"line 2, column .*{told}"):
        source[1]


def test_a_part_without_an_image_is_named_where_no_column_has_one(tmp_path: Path) -> None:
    source = source_of(lines(tmp_path / "a.jsonl", asked("fine"), asked([{"type": "image_url", "image_url": None}])))
    with pytest.raises(BadRow, match=r"line 2, column prompt\[0\].content\[0\]: has no image, and there is no column"):
        source[1]


def test_a_job_without_images_takes_none(tmp_path: Path) -> None:
    source = source_of(lines(tmp_path / "a.jsonl", asked("fine"), asked([{"type": "image", "image": URL}])), None)
    with pytest.raises(BadRow, match=r"content\[0\]: is an image, and prompts of this job are text only"):
        source[1]
    column = source_of(lines(tmp_path / "b.jsonl", {**asked("<image>"), "images": [URL]}), None)
    assert column[0].prompt == [{"role": "user", "content": "<image>"}] and column[0].images == ()


def test_files_outside_the_allowed_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "secret.png").write_bytes(FILE)
    (tmp_path / "mine" / "link.png").symlink_to(tmp_path / "secret.png")
    monkeypatch.setenv(ROOTS, str(tmp_path / "mine"))
    row = {**asked("<image>"), "images": [str(tmp_path / "mine" / "link.png")]}
    source = source_of(lines(tmp_path / "mine" / "a.jsonl", {**asked("fine"), "images": []}, row))
    with pytest.raises(BadRow, match="lies outside the folders that jobs may use"):
        source[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("images") / "model")


def rendered(folder: Path, files: tuple[bytes, ...], content: Any = SHOWN, **limits: Any) -> Any:
    from transformers import AutoTokenizer

    row = PromptRow(0, "d", [{"role": "user", "content": content}], images=files)
    pictures = Pictures.of_folder(str(folder), limits.pop("max_pixels", None))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return render(row, tokenizer, max_tokens=limits.pop("max_tokens", 200), pictures=pictures)


def test_an_image_has_as_many_tokens_as_the_model_sees(folder: Path) -> None:
    found = rendered(folder, (picture(3, 90, 130),))
    pictures = Pictures.of_folder(str(folder))
    patches, grid = pictures.pixels(found.images)
    assert found.token_ids.count(PAD) == int(grid.prod()) // 4 == len(patches) // 4 == 15
    assert found.short_ids.count(PAD) == 1
    assert rendered(folder, (FILE,), max_tokens=10).dropped is not None


def test_images_that_cannot_be_used_cost_their_row(folder: Path) -> None:
    for damaged in (FILE[:200], OTHER[:100]):
        with pytest.raises(BadRow, match="image 1 cannot be read"):
            rendered(folder, (damaged,))
    with pytest.raises(BadRow, match="image 1 is no image: its 8 bytes are of no kind"):
        rendered(folder, (b"no image",))
    narrow = picture(0, 1, 500)
    with pytest.raises(BadRow, match=r"image 2 has 1 x 500 pixels, which the .* refuses: .*aspect ratio"):
        rendered(folder, (FILE, narrow), [{"type": "image"}, {"type": "image"}])
    with pytest.raises(BadRow, match="image 1 has 60 x 40 pixels, more than 2,399"):
        rendered(folder, (FILE,), max_pixels=2399)
    with pytest.raises(BadRow, match="has 1 image, and its tokens have 2 places"):
        rendered(folder, (FILE,), [{"type": "image"}, {"type": "text", "text": "<|image_pad|>"}])


def test_a_model_that_takes_no_images_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(InvalidJob, match=r"data.images: .*is qwen3, and images were shown to be right with qwen2_5_vl"):
        check_takes_images(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    with pytest.raises(InvalidJob, match="has no processor of images"):
        check_takes_images(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(InvalidJob, match="cannot be loaded"):
        Pictures.of_folder(str(tmp_path))


def test_texts_of_jobs_with_images_are_rendered_as_before(folder: Path) -> None:
    row = PromptRow(0, "d", "plain")
    tokenizer = byte_tokenizer()
    pictures = Pictures.of_folder(str(folder))
    assert render(row, tokenizer, max_tokens=9, pictures=pictures) == render(row, tokenizer, max_tokens=9)


def test_a_judge_reads_the_text_and_that_there_are_images() -> None:
    assert text_of([{"role": "user", "content": SHOWN}]) == "See [image]?"
