"""Jobs that end, hang or starve the processes that work for them, one after another on one stack, each with a healthy
job behind it: a poisoned job ends only itself, within its budget, with its cause in the failure."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from services.coordinator.state.faults import PLACE_BUDGET, TRAINER_BUDGET
from tests.e2e.conftest import finished, until, vowels_job
from tests.models import byte_tokenizer, save_tiny_model, tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LATEST_S = 120.0
"""Bound of each wait. On two quiet cores a poisoned job has failed within 60 s, and the job behind it runs within 10 s
after that: each case prints its seconds."""

EXITS = "import os, sys\nprint('no licence found', file=sys.stderr, flush=True)\nos._exit(7)\n"
CRASHES = "import ctypes\nctypes.string_at(0)\n"
ANSWER = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    "
LOSS = """
import ctypes, os, signal
from torch import Tensor
def poisoned(*, logprobs_bt: Tensor, advantages_bt: Tensor):
    {}
    return -logprobs_bt * advantages_bt, {{}}
"""
TOKENIZER = """
import ctypes, os
from transformers import PreTrainedTokenizerFast
class Poisoned(PreTrainedTokenizerFast):
    def {}(self, *arguments, **options):
        {}
"""


@dataclass(frozen=True)
class Poison:
    """One planted job."""

    name: str
    plant: Callable[[dict[str, Any], Path], None]
    """Puts the poison into a healthy job; the folder is the job's own."""
    cause: str
    """Part of the failure."""
    matrix: bool = True
    """`make test` has the loss of a replica and of a trainer; a reward's processes are in
    tests/services/rollout/scoring/test_processes.py, and the coordinator's count in
    tests/services/coordinator/test_deaths.py."""


def _reward(source: str, **limits: Any) -> Callable[[dict[str, Any], Path], None]:
    def plant(job: dict[str, Any], folder: Path) -> None:
        (folder / "vowels.py").write_text(source)
        job["reward"] |= limits

    return plant


def _loss(line: str) -> Callable[[dict[str, Any], Path], None]:
    def plant(job: dict[str, Any], folder: Path) -> None:
        (folder / "loss.py").write_text(LOSS.format(line))
        job["algorithm"] = {"policy_loss": {"name": f"{folder}/loss.py:poisoned"}}

    return plant


def _environment(job: dict[str, Any], folder: Path) -> None:
    text = "from millrace.environments import Environment\nclass Talk(Environment):\n    pass\n"
    (folder / "talk.py").write_text(text + EXITS)
    job["rollout"]["environment"] = {"name": f"{folder}/talk.py:Talk", "processes": 1}


def _too_few_rows(job: dict[str, Any], folder: Path) -> None:
    """The tokenizer has 259 tokens; the last one is in the chat template."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(tiny_config(tied=True, vocab_size=258)).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    job["model"]["path"] = str(folder / "model")


def _tokenizer(method: str, line: str) -> Callable[[dict[str, Any], Path], None]:
    """Code of the model's folder that only replicas run."""

    def plant(job: dict[str, Any], folder: Path) -> None:
        model = save_tiny_model(folder / "model", tied=True)
        (model / "poisoned.py").write_text(TOKENIZER.format(method, line))
        file = model / "tokenizer_config.json"
        tree = json.loads(file.read_text())
        tree |= {"tokenizer_class": "Poisoned", "auto_map": {"AutoTokenizer": [None, "poisoned.Poisoned"]}}
        file.write_text(json.dumps(tree))
        job["model"] = {"path": str(model), "trust_remote_code": True}

    return plant


def _template(job: dict[str, Any], folder: Path) -> None:
    model = save_tiny_model(folder / "model", tied=True)
    (model / "chat_template.jinja").write_text("{{ raise_exception('only the moon speaks') }}")
    job["model"]["path"] = str(model)


POISONS = [
    Poison("token ids beyond the embedding", _too_few_rows, "times in a row at the work of this job", matrix=False),
    Poison(
        "a reward that ends its process at import",
        _reward(f"{EXITS}{ANSWER}return 0.0\n"),
        "exited with status 7",
    ),
    Poison("a reward that crashes at import", _reward(f"{CRASHES}{ANSWER}return 0.0\n"), "SIGSEGV"),
    Poison("an environment that ends its process at import", _environment, "talk.py"),
    Poison("a loss that crashes", _loss("ctypes.string_at(0)"), "in poisoned", matrix=False),
    Poison("a loss that ends its process", _loss("os._exit(7)"), "ended with status 7"),
    Poison("a loss that is killed", _loss("os.kill(os.getpid(), signal.SIGKILL)"), "SIGKILL"),
    Poison("a tokenizer that ends the replica", _tokenizer("__init__", "os._exit(7)"), "ended with status 7"),
    Poison("a tokenizer that crashes", _tokenizer("apply_chat_template", "ctypes.string_at(0)"), "poisoned.py"),
    Poison("a chat template that refuses everything", _template, "only the moon speaks"),
    Poison(
        "a reward that hangs",
        _reward(f"import time\n{ANSWER}time.sleep(600)\n", timeout_s=0.3, workers=4),
        "timeout after 0.3",
    ),
    Poison("a reward that needs all memory", _reward(f"{ANSWER}return len('x' * 10**10)\n", memory_mb=300), "memory"),
]


@pytest.mark.parametrize(
    "poison", [pytest.param(p, id=p.name, marks=[pytest.mark.matrix] if p.matrix else []) for p in POISONS]
)
def test_a_poisoned_job_ends_only_itself(poison: Poison, with_transformers, client, tmp_path, model) -> None:
    folders = [tmp_path / name for name in ("poisoned", "healthy")]
    for folder in folders:
        folder.mkdir()
    poisoned, healthy = (vowels_job(folder, model) for folder in folders)
    healthy["schedule"] |= {"steps": 1, "prompts_per_step": 2}
    for job in (poisoned, healthy):
        job["rollout"]["max_response_tokens"] = 16
    poison.plant(poisoned, folders[0])
    began, pids = time.monotonic(), with_transformers.pids()

    first, behind = client.submit(poisoned), client.submit(healthy)
    failed = client.wait(first.id, LATEST_S)
    failed_s = time.monotonic() - began
    until("the job behind it runs", lambda: client.job(behind.id).state not in ("queued", "starting"), LATEST_S)
    next_s = time.monotonic() - began - failed_s
    finished(client, behind.id)
    print(f"{poison.name}: failed after {failed_s:.1f} s, the next ran {next_s:.1f} s later: {failed.failure}")

    assert failed.state == "failed" and poison.cause in str(failed.failure), failed.failure
    kinds = [event.kind for event in client.events(first.id, follow=False)]
    assert kinds.count("member.configured") + kinds.count("member.failed") <= PLACE_BUDGET + 1
    assert kinds.count("trainer.lost") <= TRAINER_BUDGET + 1
    charged = [e for e in client.events(behind.id, follow=False) if e.kind == "member.died" and e.data.deaths]
    assert len(charged) <= 1, "at most a process that the poisoned job had doomed before it ended"
    assert with_transformers.pids().keys() == pids.keys(), "every service of the stack is there"
