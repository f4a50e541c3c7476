"""CONTRIBUTING.md, followed to the letter in a copy of the tree: what it says to add is added, and works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(python|diff)\n# (\S+/\S+)\n(.*?)```", re.DOTALL)
JOB = """
from millrace.spec import parse
def job(**parts):
    whole = {"name": "test", "output": "/tmp/unused", "model": {"path": "/tmp"}, "data": {"files": ["/tmp/rows.jsonl"]},
             "rollout": {"max_response_tokens": 8}, "trainer": {"token_budget": 4096}}
    return parse({key: whole.get(key, {}) | parts.get(key, {}) if isinstance(whole.get(key, {}), dict) else whole[key]
                  for key in {*whole, *parts}})
"""


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with every block of the page applied."""
    copy = tmp_path_factory.mktemp("contributing")
    for top in ("millrace", "services", "tests"):
        shutil.copytree(ROOT / top, copy / top, ignore=shutil.ignore_patterns("__pycache__"))
    for kind, path, text in BLOCK.findall(PAGE):
        target = copy / path
        if kind == "python":
            assert not target.exists(), f"the page adds {path}, which exists"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        else:
            target.write_text(patched(target.read_text(), text, path))
    return copy


def patched(before: str, diff: str, path: str) -> str:
    """`before` with the + lines of the diff after its context, which must be found exactly once."""
    context = "".join(line[1:] for line in diff.splitlines(keepends=True) if line.startswith(" "))
    added = "".join(line[1:] for line in diff.splitlines(keepends=True) if line.startswith("+"))
    assert context and added and before.count(context) == 1, f"{path} has these lines {before.count(context)} times"
    return before.replace(context, context + added)


def succeeds(folder: Path, *command: str, limit_s: float = 120) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_reward(followed: Path) -> None:
    code = """
from millrace.rewards.registry import load
spec = job(reward={"function": "length", "options": {"words": 4}})
score = load(spec.reward.function, spec.reward.options)
print(score(data_source="d", solution_str="one two three", ground_truth=None))
"""
    assert succeeds(followed, "-c", JOB + code).strip() == "0.75"


def test_a_tracker(followed: Path, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from millrace.trackers import TrackedJob, open_trackers
names = job(tracking={{"trackers": ["table"]}}).tracking.trackers
(tracker,) = open_trackers(names, TrackedJob("job-1", "test", "tests", Path("{tmp_path}"), {{}}))
tracker.log(3, {{"reward": 0.5}})
tracker.close()
"""
    succeeds(followed, "-c", JOB + code)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["3,reward,0.5"]


def test_a_policy_loss_with_a_new_input(followed: Path) -> None:
    code = """
import torch
from services.trainer.algorithms.losses import policy_loss
job(algorithm={"policy_loss": {"name": "anchored"}, "kl": "k3"})
one = torch.ones(1, 2)
inputs = dict(logprobs_bt=-one, old_logprobs_bt=-one, advantages_bt=one, mask_bt=one)
print(float(policy_loss("anchored", **inputs, ref_logprobs_bt=-one)[0]))
"""
    assert succeeds(followed, "-c", JOB + code).strip() == "1.0"


def test_a_backend_option(followed: Path) -> None:
    code = """
from millrace.backends.fsdp2 import parse as options
from millrace.errors import InvalidJob
print(options(job(trainer={"backend_options": {"float32_products": "high"}}).trainer.backend_options).float32_products)
try:
    options({"float32_products": "low"})
except InvalidJob as error:
    print("float32_products" in error.what, bool(error.fix))
"""
    assert succeeds(followed, "-c", JOB + code).split() == ["high", "True", "True"]


@pytest.mark.slow
def test_what_was_added_trains_a_step_and_serves(followed: Path) -> None:
    """The loss with the tensor that it needs from the trainer, and the option, in a real step of the FSDP2 backend. The
    engine, started for real, gives what every engine owes a replica."""
    added = "tests/services/trainer/step/test_added.py"
    (followed / added).write_text(TRAINS)
    tests = (added, "tests/services/rollout/engines/test_engines.py")
    chosen = "test_a_step or (delayed and tells_what_it_is)"
    told = succeeds(followed, "-m", "pytest", "-q", "-n", "0", *tests, "-k", chosen, limit_s=200)
    assert "2 passed" in told


TRAINS = """
import torch

from tests.services.trainer.step.test_every_algorithm import Trainer, running, scored_groups  # noqa: F401


def test_a_step(running: Trainer) -> None:  # noqa: F811
    loss = {"policy_loss": {"name": "anchored"}, "kl": "k3"}
    metrics = running.step(running.spec(loss, lr=0.0), scored_groups(running.backend))
    assert metrics["actor/grad_norm"] > 0
"""
