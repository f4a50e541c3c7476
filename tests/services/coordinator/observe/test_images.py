"""The images of prompts: what their first bytes tell, and their files, read from the job's data again."""

import asyncio
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from millrace.contracts.v1 import common_pb2
from millrace.errors import NotFound
from millrace.ids import JobId
from millrace.rest import JobState
from services.coordinator.observe.groups import samples_of
from services.coordinator.observe.images import ImageFiles, header, view
from services.coordinator.state.job import JobRecord


def file_of(kind: str, size: tuple[int, int] = (37, 21), mode: str = "RGB", **options: Any) -> bytes:
    made = io.BytesIO()
    Image.effect_noise(size, 50).convert(mode).save(made, kind, **options)
    return made.getvalue()


NOTES = b"II*\x00\x08" + bytes(3000)
KINDS = {
    "png": file_of("PNG"),
    "grey-png": file_of("PNG", (300, 2), "L"),
    "jpeg": file_of("JPEG"),
    "progressive": file_of("JPEG", (400, 1000), progressive=True, icc_profile=bytes(70_000), exif=b"Exif\0\0" + NOTES),
    "webp": file_of("WEBP"),
    "webp-lossless": file_of("WEBP", (1025, 3), lossless=True),
    "webp-alpha": file_of("WEBP", (18, 700), "RGBA", exif=NOTES),
    "gif": file_of("GIF", (260, 5), "P"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kind_and_size_are_those_that_pillow_finds(name: str) -> None:
    file = KINDS[name]
    with Image.open(io.BytesIO(file)) as image:
        assert header(file) == (Image.MIME[str(image.format)], *image.size)


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_is_cut_off_has_its_size_or_none(name: str) -> None:
    file = KINDS[name]
    whole = header(file)
    for length in range(min(len(file), 200)):
        assert header(file[:length]) in (whole, (whole[0], None, None), ("", None, None))


def test_other_files_have_no_kind() -> None:
    for file in (file_of("BMP"), file_of("TIFF"), b"<svg/>", b"<html>", b"RIFF0000WAVE", b""):
        assert header(file) == ("", None, None)


def test_samples_tell_the_images_of_their_prompt_and_where_they_stand() -> None:
    group = common_pb2.Group(prompt_id="0-1", prompt_text="a [i] b [i]", image_mark="[i]")
    group.images.extend([KINDS["png"], KINDS["jpeg"]])
    group.trajectories.add()
    (sample,) = samples_of(group, 3)
    assert sample.image_mark == "[i]" and [each.media_type for each in sample.images] == ["image/png", "image/jpeg"]
    digest = hashlib.sha256(KINDS["png"]).hexdigest()
    first = sample.images[0]
    assert (first.width, first.height, first.bytes, first.sha256) == (37, 21, len(KINDS["png"]), digest)


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """The spec of a job whose training data has four rows, with files for images, and whose held-out row has one."""
    (tmp_path / "there.png").write_bytes(KINDS["png"])
    (tmp_path / "bitmap.png").write_bytes(file_of("BMP"))
    paths = [[str(tmp_path / name)] for name in ("there.png", "gone.png", "bitmap.png")] + [[]]
    rows = [{"prompt": f"row {n}" + "<image>" * len(images), "images": images} for n, images in enumerate(paths)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text(json.dumps(rows[0]))
    return {
        "name": "look",
        "output": str(tmp_path / "out"),
        "model": {"path": "/model"},
        "data": {"files": [str(tmp_path / "train.jsonl")], "prompt_format": "chat", "images": {}},
        "evaluation": {"files": [str(tmp_path / "held_out.jsonl")]},
    }


def job_of(tree: dict[str, Any]) -> JobRecord:
    return JobRecord(JobId("job-000000000000"), "look", JobState.SUCCEEDED, 0.0, spec_json=json.dumps(tree))


def found(tree: dict[str, Any], prompt_id: str, number: int = 1, sha256: str = "") -> tuple[bytes, str]:
    return asyncio.run(ImageFiles().get(job_of(tree), prompt_id, number, sha256))


def test_images_are_read_from_the_row_of_their_prompt(tree: dict[str, Any]) -> None:
    digest = view(KINDS["png"]).sha256
    for prompt_id in ("0-0", "7-0", "e3-0"):
        assert found(tree, prompt_id) == found(tree, prompt_id, sha256=digest) == (KINDS["png"], "image/png")


REFUSED = {
    "no such image": (("0-0", 2), "image 2 of prompt 0-0 of job-000000000000: the prompt has 1 image"),
    "no image": (("0-3", 1), "the prompt has 0 images"),
    "no such row": (("0-4", 1), "its data has 4 rows"),
    "no such held-out row": (("e0-1", 1), "its evaluation has 1 rows"),
    "the file is gone": (("0-1", 1), r"images\[0\]: .*gone.png.*: cannot be read: No such file"),
    "a bitmap": (("0-2", 1), "neither PNG, JPEG, WebP nor GIF"),
    "another file": (("0-0", 1, "0" * 64), "the data has another image now"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_is_named_with_a_fix(case: str, tree: dict[str, Any]) -> None:
    asked, told = REFUSED[case]
    with pytest.raises(NotFound, match=told) as refused:
        found(tree, *asked)
    assert refused.value.fix


def test_jobs_without_images_and_data_that_is_gone_are_told(tree: dict[str, Any], tmp_path: Path) -> None:
    for changed, told in (
        ({"data": tree["data"] | {"images": None}}, "its spec has no data.images"),
        ({"evaluation": None}, "its spec has no evaluation"),
        ({"of another release": 1}, "is of another release"),
    ):
        with pytest.raises(NotFound, match=told):
            found(tree | changed, "e0-0")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(NotFound, match=r"data of job-000000000000 cannot be opened: data.files: .*train.jsonl"):
        found(tree, "0-0")


def test_the_data_stays_open_for_the_next_image_and_is_opened_again_for_another_job(tree: dict[str, Any]) -> None:
    async def scenario() -> None:
        files = ImageFiles()
        await files.get(job_of(tree), "0-0", 1)
        os.remove(tree["data"]["files"][0])
        assert (await files.get(job_of(tree), "0-0", 1))[1] == "image/png"
        await files.get(job_of(tree), "e0-0", 1)
        with pytest.raises(NotFound, match="cannot be opened"):
            await files.get(job_of(tree), "0-0", 1)

    asyncio.run(scenario())
