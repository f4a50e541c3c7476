"""The next job gets the engine of the one before where it needs the same, and nothing of that job with it."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.errors import InvalidState
from millrace.spec import JobSpec
from services.rollout import replica as replica_module
from services.rollout.engine import Sampling
from services.rollout.engines import create
from services.rollout.engines.options import differing_needs, engine_needs
from tests.models import random_model
from tests.sender import Sender, export
from tests.services.rollout.coordinator import Publication, configure
from tests.services.rollout.jobs import adapter_job, job_spec
from tests.services.rollout.parameters import engine_parameters
from tests.services.rollout.stack import Stack, replica_stack

VLLM = pytest.param("vllm", marks=[pytest.mark.e2e, pytest.mark.matrix])
PROMPT, GREEDY = [5, 6, 7, 8] * 8, Sampling(max_response_tokens=4, temperature=0.0)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines that replicas have made."""
    made: list[Any] = []

    def counted(*arguments: Any) -> Any:
        made.append(create(*arguments))
        return made[-1]

    monkeypatch.setattr(replica_module, "create", counted)
    return made


def copied(folder: Path, to: Path) -> Path:
    """A copy of a model folder's own files, elsewhere."""
    to.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            shutil.copyfile(path, to / path.name)
    return to


async def serve(stack: Stack, job: str, seed: int) -> None:
    """Brings the replica version 1 of a job: the weights of a random model."""
    sender = Sender(export(random_model(tied=True, seed=seed)), version=1, job=job)
    await Publication(stack.peer, stack.replica.member_id, sender).whole()


@pytest.mark.parametrize("engine", ["transformers", VLLM])
def test_a_job_on_a_copy_of_the_model_takes_the_engine_over(
    engine: str, tied_model: Path, tmp_path: Path, starts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the test reads the weights back by a function

    async def scenario() -> None:
        async with replica_stack(engine) as stack:
            answer = await configure(stack.peer, job_spec(tied_model, engine), "first")
            assert (answer.kept_engine, list(answer.engine_changes), len(starts)) == (False, [], 1)
            await serve(stack, "first", seed=1)
            (held,) = starts
            before = (await held.generate(PROMPT, GREEDY)).tokens.tolist()
            spec = job_spec(copied(tied_model, tmp_path / "copy"), engine, rollout={"samples_per_prompt": 8})
            for _ in range(2):  # also where the coordinator did not get the first answer
                answer = await configure(stack.peer, spec, "second")
                assert answer.kept_engine and starts == [held]
            with pytest.raises(InvalidState, match="no version is in place"):
                await held.generate(PROMPT, GREEDY)
            await serve(stack, "second", seed=2)
            after = await held.generate(PROMPT, GREEDY)
            assert after.tokens.tolist() != before and [span.version for span in after.versions] == [1]
            for name, expected in export(random_model(tied=True, seed=2)).items():
                assert torch.equal((await engine_parameters(held))[name], expected), name
            if engine == "vllm":
                assert held.stats().cached_prompt_tokens == 0, "the same prompt was in the cache of the first job"

    asyncio.run(scenario())


@pytest.mark.parametrize("engine", ["transformers", VLLM])
def test_adapters_of_another_rank_need_another_engine(engine: str, tied_model: Path, starts: list[Any]) -> None:
    async def scenario() -> None:
        async with replica_stack(engine) as stack:
            found = []
            for number, rank in enumerate((4, 4, 8)):
                spec = adapter_job(tied_model, engine, rank=rank, targets=["q_proj"])
                answer = await configure(stack.peer, spec, f"job-{number}")
                found.append((answer.kept_engine, list(answer.engine_changes), len(starts), answer.has_base))
            kept = (True, [], 1, False)  # the base is published to it again: the other job's may be another one
            assert found == [(False, [], 1, False), kept, (False, ["model.lora.rank"], 2, False)]

    asyncio.run(scenario())


def changed(tied_model: Path, **changes: dict[str, Any]) -> list[str]:
    """The fields in which a job with these changes needs another vLLM."""
    plain = engine_needs(job_spec(tied_model, "vllm"), "vllm")
    return differing_needs(plain, engine_needs(job_spec(tied_model, "vllm", **changes), "vllm"))


def test_what_needs_another_engine_is_named(tied_model: Path) -> None:
    rollout: dict[str, Any] = {"dtype": "float32", "samples_per_prompt": 4, "max_response_tokens": 200}
    options = {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 27, "gpu_memory_utilization": 0.1}
    assert changed(tied_model, rollout=rollout | {"engine_options": options}) == ["rollout.engine_options.max_num_seqs"]
    assert changed(tied_model, rollout={"engine_options": {"transformers": {"max_num_seqs": 1}, **options}}) == [
        "rollout.engine_options.max_num_seqs"
    ]
    assert changed(tied_model, rollout={"dtype": "bfloat16"}) == ["rollout.dtype"]
    assert changed(tied_model, data={"max_prompt_tokens": 100}) == [
        "data.max_prompt_tokens + rollout.max_response_tokens"
    ]
    assert changed(tied_model, data={"images": {}}) == ["data.images", "model.path (weights)"]
    trained = changed(tied_model, data={"images": {}}, trainer={"train_tower": True})
    assert trained == ["data.images", "trainer.train_tower"]


def lora(tied_model: Path, **options: Any) -> dict[str, Any]:
    spec = adapter_job(tied_model, "vllm")
    assert spec.model.lora is not None
    model = spec.model.model_copy(update={"lora": spec.model.lora.model_copy(update=options)})
    return engine_needs(spec.model_copy(update={"model": model}), "vllm")


def test_adapters_differ_in_shape_alone(tied_model: Path) -> None:
    plain, adapted = engine_needs(job_spec(tied_model, "vllm"), "vllm"), lora(tied_model)
    assert differing_needs(plain, adapted) == ["model.lora"]
    assert differing_needs(adapted, lora(tied_model, rank=4)) == ["model.lora.rank"]
    assert differing_needs(adapted, lora(tied_model, alpha=4.0, init="xavier", dropout=0.1)) == []
    assert differing_needs(plain, lora(tied_model, merge=True, rank=4)) == [], "whole weights are published"


def test_reported_experts_need_an_engine_that_reports_them(tied_model: Path) -> None:
    spec: JobSpec = job_spec(tied_model, "vllm")
    replayed = spec.algorithm.model_copy(update={"router_replay": True})
    needs = engine_needs(spec.model_copy(update={"algorithm": replayed}), "vllm")
    assert differing_needs(engine_needs(spec, "vllm"), needs) == ["algorithm.router_replay"]


def test_a_folder_that_was_changed_is_another_model(tied_model: Path, tmp_path: Path) -> None:
    folder = copied(tied_model, tmp_path / "model")
    before = engine_needs(job_spec(folder), "transformers")
    for weights in folder.glob("*.safetensors"):
        weights.touch()  # a publication brings them
    assert engine_needs(job_spec(folder), "transformers") == before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    assert differing_needs(before, engine_needs(job_spec(folder), "transformers")) == ["model.path (config.json)"]
