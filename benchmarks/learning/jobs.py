"""The demo's job in several forms that are compared: with each algorithm, or with all weights and with adapters."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.demo.run import Run
from millrace.spec import JobSpec, parse


@dataclass(frozen=True)
class Variant:
    """One form of the demo's job."""

    algorithm: Mapping[str, Any] = field(default_factory=lambda: {"preset": "grpo"})
    backend: str = "fsdp2"
    lora: int | None = None
    """Rank of the adapters; None: all weights are trained."""


ALGORITHMS: Mapping[str, Variant] = {
    "grpo": Variant(),
    "rloo": Variant({"preset": "rloo"}),
    "reinforce++": Variant({"preset": "reinforce++"}),
    "ppo": Variant({"preset": "ppo", "critic": {"optimizer": {"lr": 5.0e-4, "weight_decay": 0.0}}}),
    "gspo": Variant({"preset": "gspo"}),
    "cispo": Variant({"preset": "cispo"}),
    # Near the end nearly all groups are right throughout, so that many have to be drawn for each that is trained.
    "dapo": Variant({"preset": "dapo", "overlong_buffer_tokens": 2, "max_refills": 200}),
}
ADAPTERS: Mapping[str, Variant] = {
    f"{backend}{f'-lora-{rank}' if rank else ''}": Variant(backend=backend, lora=rank)
    for backend in ("fsdp2", "megatron")
    for rank in (None, 8, 32)
}


@dataclass(frozen=True)
class Comparison:
    """Variants that are told side by side in a section of a page, with a figure."""

    name: str
    heading: str
    column: str
    """Heading of the column with the variants' names."""
    words: str
    """What is compared; {steps} and {margin} are filled in."""
    command: str
    variants: Mapping[str, Variant]

    @property
    def figure(self) -> str:
        """File name of the figure."""
        return "learning.svg" if self.name == "learning" else f"learning-{self.name}.svg"


COMPARISONS: Mapping[str, Comparison] = {
    "algorithms": Comparison(
        name="learning",
        heading="Learning, by algorithm",
        column="algorithm",
        words="""\
The demo's task: {steps} steps of 16 prompts × 8 samples, strictly on-policy, each algorithm by its
preset, all with the demo's learning rate. Greedy reward on 256 words that were not trained on: the mean over
the seeds and, in brackets, each seed's. A run has learnt when it rose by {margin:.2f}. The training reward
of dapo is that of groups with a signal only.""",
        command="make bench-learning",
        variants=ALGORITHMS,
    ),
    "adapters": Comparison(
        name="adapters",
        heading="Learning with adapters",
        column="backend and rank",
        words="""\
The demo's task by grpo: {steps} steps of 16 prompts × 8 samples, all weights or adapters of rank 8 and 32
(`model.lora`), the adapters with ten times the learning rate. Columns as in the table by algorithm; a run has
learnt when the reward on words that were not trained on rose by {margin:.2f}.""",
        command='make bench-learning LEARNING="--compare adapters"',
        variants=ADAPTERS,
    ),
}
EVERY_STEPS = 5
"""Between evaluations."""


def job_spec(state: Path, name: str, variant: Variant, seed: int, steps: int, data: tuple[Path, Path]) -> JobSpec:
    """`data` is what to train on and what to hold out; all else but the variant is as in the demo."""
    demo = Run(state, seed, steps, variant.backend, lora=variant.lora).job_spec(data).model_dump(mode="json")
    changes = {
        "name": f"learning {name.replace('+', 'p')} seed {seed}",
        "algorithm": dict(variant.algorithm),
        "evaluation": demo["evaluation"] | {"every_steps": EVERY_STEPS},
        "output": str(state / "outputs" / time.strftime(f"{name}-{seed}-%Y%m%d-%H%M%S")),
    }
    return parse(demo | changes)
