"""The demo's job with each algorithm."""

import time
from pathlib import Path
from typing import Any

import yaml

from millrace.demo.run import JOB, model_folder
from millrace.spec import JobSpec, parse

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "rloo": {"preset": "rloo"},
    "reinforce++": {"preset": "reinforce++"},
    "ppo": {"preset": "ppo", "critic": {"optimizer": {"lr": 5.0e-4, "weight_decay": 0.0}}},
    "gspo": {"preset": "gspo"},
    "cispo": {"preset": "cispo"},
    # Near the end nearly all groups are right throughout, so that many have to be drawn for each that is trained.
    "dapo": {"preset": "dapo", "overlong_buffer_tokens": 2, "max_refills": 200},
}
EVERY_STEPS = 5
"""Between evaluations."""


def job_spec(state: Path, algorithm: str, seed: int, steps: int, data: tuple[Path, Path]) -> JobSpec:
    """`data` is what to train on and what to hold out; all else but the algorithm is as in the demo."""
    tree = yaml.safe_load(JOB.read_text())
    tree["name"] = f"learning {algorithm.replace('+', 'p')} seed {seed}"
    tree["model"]["path"] = str(model_folder(state, seed))
    tree["data"] |= {"files": [str(data[0])], "seed": seed}
    tree["algorithm"] = ALGORITHMS[algorithm]
    tree["evaluation"] |= {"files": [str(data[1])], "every_steps": EVERY_STEPS}
    tree["trainer"]["seed"] = seed
    tree["trainer"]["optimizer"]["warmup_steps"] = min(steps, tree["trainer"]["optimizer"]["warmup_steps"])
    tree["schedule"]["steps"] = steps
    tree["output"] = str(state / "outputs" / time.strftime(f"{algorithm}-{seed}-%Y%m%d-%H%M%S"))
    return parse(tree)
