"""What REST tells of a job besides its state: curves, groups, tokens, publications, its spec."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from millrace.cli.show import save_images
from millrace.data.columns.images import data_url
from millrace.rest import SpecView
from services.coordinator.rest.reading import stored_view
from tests.services.coordinator.cluster import Cluster, scenario

pytestmark = pytest.mark.slow


@scenario
async def test_what_a_job_has_left(cluster: Cluster, spec: dict[str, Any]) -> None:
    await cluster.trainer()
    await cluster.replica()
    job_id = await cluster.submit(spec)
    job = await cluster.ended(job_id)
    assert job.step == 6
    base = f"http://127.0.0.1:{cluster.coordinator.http_port}"
    async with httpx.AsyncClient(base_url=base, trust_env=False) as http:

        async def get(path: str, **query: Any) -> Any:
            answer = await http.get(f"/v1/jobs/{job_id}/{path}", params=query)
            assert answer.status_code == 200, answer.text
            return answer.json()

        keys = {metric["key"] for metric in await get("metrics/keys")}
        assert {"critic/score/mean", "val-core/sums/reward/mean@1"} <= keys
        found = await get("series", keys=["critic/score/mean", "critic/score/max"], first=1)
        rows = (await get("metrics"))[1:]
        assert found["steps"] == [*range(1, 7)]
        assert found["metrics"]["critic/score/mean"]["mean"] == [row["values"]["critic/score/mean"] for row in rows]
        newest = (await get("groups", purpose="train", limit=1))["groups"][0]
        assert newest["step"] == 6 and len(newest["samples"]) == 2
        tokens = await get(f"tokens/{newest['samples'][0]['record']}")
        assert [len(each["ids"]) for each in tokens] == [3 + 4, 3 + 4] and tokens[0]["logprobs"][3:] == [-1.0] * 4
        publications = await get("publications", limit=3)
        assert [each["version"] for each in publications] == [6, 5, 4] and publications[0]["members"]
        told = await get("spec")
        assert told["given"]["schedule"]["steps"] == 6 and "save_every_steps" not in told["given"]["schedule"]
        assert "optimizer" not in told["given"]["trainer"] and "optimizer" in told["spec"]["trainer"]
        events = (await http.get(f"/v1/jobs/{job_id}/events?newest=2&follow=false")).text
        assert events.count("\nevent: ") + events.startswith("event: ") == 2 and '"state": "succeeded"' in events
        gone = await http.get(f"/v1/jobs/{job_id}/tokens/1-1")
        assert gone.status_code == 404 and gone.json()["fix"]


def with_pictures(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The job with two images in each prompt: a file, and a data URL."""
    png = folder / "shown.png"
    Image.new("RGB", (5, 3), "red").save(png)
    model = folder / "model"
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "preprocessor_config.json").write_text("{}")
    parts = [
        {"type": "image_url", "image_url": {"url": str(png)}},
        {"type": "text", "text": "or"},
        {"type": "image_url", "image_url": {"url": data_url(png.read_bytes())}},
    ]
    row = {"prompt": [{"role": "user", "content": parts}], "ground_truth": "1"}
    (folder / "pictures.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    data = {"files": [str(folder / "pictures.jsonl")], "images": {}, "max_prompt_tokens": 64}
    return spec | {"data": data, "evaluation": None, "schedule": {"steps": 1, "prompts_per_step": 4}}


@scenario
async def test_the_images_of_a_prompt(cluster: Cluster, spec: dict[str, Any]) -> None:
    tmp_path = Path(spec["output"]).parent
    await cluster.trainer()
    await cluster.replica()
    client = cluster.coordinator.client
    job_id = await cluster.submit(with_pictures(spec, tmp_path))
    assert (await cluster.ended(job_id)).step == 1
    shown = tmp_path / "shown.png"
    samples = await asyncio.to_thread(client.samples, job_id)
    first = samples[0]
    assert [(each.width, each.height, each.media_type) for each in first.images] == [(5, 3, "image/png")] * 2
    assert first.prompt.count(first.image_mark) == 2
    base = f"http://127.0.0.1:{cluster.coordinator.http_port}"
    async with httpx.AsyncClient(base_url=base, trust_env=False) as http:
        path = f"/v1/jobs/{job_id}/prompts/{first.prompt_id}/images"
        for number, image in enumerate(first.images, 1):
            answer = await http.get(f"{path}/{number}", params={"sha256": image.sha256})
            assert answer.status_code == 200 and answer.content == shown.read_bytes()
            told = answer.headers
            assert told["Content-Type"] == "image/png" and told["X-Content-Type-Options"] == "nosniff"
            assert "sandbox" in told["Content-Security-Policy"] and told["Cache-Control"].startswith("private, max-age")
        assert (await http.get(f"{path}/1")).headers["Cache-Control"] == "no-store"
        missing = await http.get(f"{path}/3")
        assert missing.status_code == 404 and "has 2 images" in missing.json()["detail"] and missing.json()["fix"]
        for wrong in (f"{path}/0", f"{path}/one", f"{path}/1?sha256=ABC", path.replace(first.prompt_id, "x") + "/1"):
            assert (await http.get(wrong)).status_code in (404, 422), wrong
    folder = tmp_path / "written"
    saved = await asyncio.to_thread(save_images, client, job_id, samples, folder)
    assert len(saved) == 2 * len({sample.prompt_id for sample in samples}) == len(list(folder.iterdir()))
    assert {each.path for each in saved} == {str(path) for path in folder.iterdir()}
    assert all(path.read_bytes() == shown.read_bytes() for path in folder.iterdir())
    Image.new("RGB", (5, 3), "blue").save(shown)
    saved = await asyncio.to_thread(save_images, client, job_id, samples[:1], tmp_path / "again")
    assert "has another image now" in saved[0].problem and not saved[0].path and saved[1].path


def test_a_spec_that_this_release_does_not_know_is_shown_whole() -> None:
    tree = {"field": {"of": "another release"}}
    assert stored_view(tree) == SpecView(spec=tree, given=tree)


@scenario
async def test_a_spec_is_checked_without_being_submitted(cluster: Cluster, spec: dict[str, Any]) -> None:
    base = f"http://127.0.0.1:{cluster.coordinator.http_port}"
    async with httpx.AsyncClient(base_url=base, trust_env=False) as http:
        before = (await http.get("/v1/jobs")).json()["total"]
        valid = (await http.post("/v1/spec/validate", json=spec)).json()
        assert valid["valid"] and not valid["mistakes"] and valid["spec"]["given"]["name"] == "sums"
        assert not valid["advice"]
        small = spec | {"model": {**spec["model"], "lora": {"rank": 8}}, "trainer": {"optimizer": {"lr": 1e-5}}}
        small = (await http.post("/v1/spec/validate", json=small)).json()
        assert small["valid"] and [each["field"] for each in small["advice"]] == ["model.lora.rank"]
        wrong = (await http.post("/v1/spec/validate", json=spec | {"modell": 1, "name": ""})).json()
        assert not wrong["valid"] and {each["field"] for each in wrong["mistakes"]} == {"modell", "name"}
        assert all(each["fix"] for each in wrong["mistakes"])
        schema = (await http.get("/v1/spec/schema")).json()
        assert {"name", "model", "data"} <= set(schema["properties"])
        assert (await http.get("/v1/jobs")).json()["total"] == before
        page = await http.get("/")
        assert (
            page.text.startswith("<!doctype html>") and "default-src 'self'" in page.headers["Content-Security-Policy"]
        )
        for name in ("page.js", "page.css"):
            found = await http.get(f"/static/{name}")
            assert found.status_code == 200 and found.headers["Cache-Control"] == "no-cache"
            known = {"If-None-Match": found.headers["ETag"]}
            assert (await http.get(f"/static/{name}", headers=known)).status_code == 304
