"""Each engine and backend has a folder, and a descriptor that is true without importing it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.backends import BACKENDS
from millrace.engines import ENGINES, mistakes_of
from millrace.software import Software
from millrace.spec import load

ROOT = Path(__file__).parents[1]
REFERENCES = [
    *(engine.implementation for engine in ENGINES.values()),
    *(backend.build for backend in BACKENDS.values()),
    *(backend.check for backend in BACKENDS.values() if backend.check),
]


def folders(parent: str) -> set[str]:
    return {path.parent.name for path in (ROOT / parent).glob("*/__init__.py")}


def test_each_folder_of_the_services_has_a_descriptor_of_its_name() -> None:
    assert set(ENGINES) == folders("services/rollout/engines")
    assert set(BACKENDS) == folders("services/trainer/backends")


@pytest.mark.parametrize("reference", REFERENCES)
def test_each_reference_leads_to_a_definition(reference: str) -> None:
    module, name = reference.split(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_reading_them_imports_nothing_that_they_describe() -> None:
    modules = {"torch", "vllm", "sglang", "transformers", "megatron", "services"}
    code = f"import sys, millrace.engines, millrace.backends; print(*({modules} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_an_option_that_one_engine_reserves_may_be_another_s() -> None:
    for name, engine in ENGINES.items():
        others = {option for other in ENGINES.values() if other is not engine for option in other.reserved_options}
        assert engine.unreserved_options <= others and not engine.unreserved_options & engine.reserved_options.keys()
        assert not list(mistakes_of({name: engine.options_example}))


def test_sizes_multiply_to_the_gpus_of_a_replica() -> None:
    assert ENGINES["vllm"].world_size({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}) == 8
    assert ENGINES["vllm"].world_size({"tensor_parallel_size": 4, "data_parallel_size": 8}) == 32
    assert ENGINES["vllm"].copies({"tensor_parallel_size": 4, "data_parallel_size": 8}) == 8
    assert ENGINES["vllm"].copies({}) == ENGINES["sglang"].copies({"tp_size": 2}) == 1
    assert ENGINES["sglang"].world_size({"tp_size": 2, "tensor_parallel_size": 4}) == 2
    assert ENGINES["vllm"].world_size({}) == ENGINES["transformers"].world_size({}) == 1


WORDS = {"One GPU": 1, "Two GPUs": 2, "Eight GPUs": 8, "Sixteen GPUs": 16}


@pytest.mark.parametrize("file", sorted((ROOT / "presets").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_ready_job_names_the_gpus_that_it_takes(file: Path) -> None:
    spec, head = load(file), " ".join(re.findall(r"^# (.*)$", file.read_text(), re.MULTILINE))
    (said,) = [number for words, number in WORDS.items() if f"{words} a replica" in head] or [None]
    if said is not None:
        assert ENGINES["vllm"].world_size(spec.rollout.options_of("vllm")) == said
    trainer = re.search(r"on (\d+) trainer GPUs", head)
    backend = BACKENDS[spec.trainer.backend]
    multiple = backend.ranks_multiple(backend.options(**spec.trainer.backend_options))
    assert trainer is not None and int(trainer[1]) % multiple == 0


def test_a_release_is_compared_with_those_that_were_run() -> None:
    software = Software("It", ("it", "it-cpu"), (), (), tested={"it": ("1.2",), "it-cpu": ("1.10",)})
    assert software.oldest_tested == "1.2"
    assert not any(map(software.release_warning, ("1.2", "1.2.7", "1.9.0", "1.10.1.post1")))
    assert "It 1.11 was not tried; 1.2 to 1.10 were" in software.release_warning("1.11")
    assert (
        software.was_tested("it", "1.2.3+cu130")
        and not software.was_tested("it", "1.20")
        and software.was_tested("a", "1")
    )
