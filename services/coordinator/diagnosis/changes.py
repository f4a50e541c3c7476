"""What to change for each bottleneck, the most helpful first: only what the job does not have already. A test checks
that each setting is in the spec."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from millrace.rest.diagnosis import Bottleneck, ChangeView
from millrace.spec.job import JobSpec


def _more_than_1(value: Any) -> bool:
    return bool(value > 1)


def _is_set(value: Any) -> bool:
    return bool(value)


def _is_off(value: Any) -> bool:
    return not value


@dataclass(frozen=True)
class Change:
    """A change that may help."""

    setting: str
    """A field of the spec; empty if it is none of the job's."""
    advice: str
    helps: Callable[[Any], bool] = lambda value: True
    """Whether it changes anything if the setting has this value."""
    none_helps: bool = False
    """Whether it is for a section that the job does not have."""

    def view(self, spec: JobSpec) -> ChangeView | None:
        """The change with the present value; None if the job has no such setting, or has the advised value."""
        if not self.setting:
            return ChangeView(setting="", advice=self.advice)
        value = present(spec, self.setting)
        if (value is None) is not self.none_helps or (value is not None and not self.helps(value)):
            return None
        now = "" if value is None else f" Now: {json.dumps(value)}."
        return ChangeView(setting=self.setting, advice=f"{self.advice}{now}")


def present(spec: JobSpec, setting: str) -> Any:
    """The value of a setting, in JSON's types; None if the job has no such section."""
    value: Any = spec
    for name in setting.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def changes(bottleneck: Bottleneck, spec: JobSpec) -> list[ChangeView]:
    """What may help a job against a bottleneck."""
    return [view for change in CHANGES[bottleneck] if (view := change.view(spec)) is not None]


_SHORTER = "lower it: the longest answers decide."
CHANGES: dict[Bottleneck, tuple[Change, ...]] = {
    Bottleneck.GENERATION: (
        Change("", "start more replicas: they join while the job runs (docs/running.md)."),
        Change("rollout.engine_options", "let each engine run more samples at once: `max_num_seqs` in vLLM."),
        Change("rollout.max_response_tokens", "lower it where long answers earn nothing.", _more_than_1),
        Change("rollout.samples_per_prompt", "generate fewer answers to each prompt.", _more_than_1),
    ),
    Bottleneck.LONG_TAIL: (
        Change("", "remove a slow replica with `millrace drain MEMBER`, or find out what else its host does."),
        Change("schedule.max_staleness", "raise it, so that the others generate for later steps meanwhile."),
        Change("rollout.max_response_tokens", _SHORTER, _more_than_1),
    ),
    Bottleneck.REWARDS: (
        Change("reward.workers", "raise it: so many processes of a replica score at once."),
        Change("reward.timeout_s", "lower it, so that a call that hangs costs less."),
        Change("schedule.max_staleness", "raise it, so that generation goes on while groups are scored."),
    ),
    Bottleneck.ENVIRONMENT: (
        Change("rollout.environment.episode_s", "lower it, so that an episode that hangs costs less."),
        Change("rollout.environment.max_turns", "lower it where later turns earn nothing.", _more_than_1),
        Change("rollout.environment.processes", "raise it where plain calls of the class are slow."),
        Change("rollout.environment.episodes_per_process", "raise it, so that more episodes generate meanwhile."),
        Change("", "see which tools take long: `millrace timeline`."),
    ),
    Bottleneck.TRAINER: (
        Change("", "start the trainer with more ranks."),
        Change("trainer.token_budget", "raise it as far as memory allows: larger micro-batches use a GPU better."),
        Change(
            "trainer.activation_recompute",
            "switch it off where memory allows: it costs about a third more work.",
            _is_set,
        ),
        Change(
            "schedule.max_staleness",
            "set it to 1 at least, so that engines generate while the trainer trains.",
            _is_off,
        ),
    ),
    Bottleneck.PUBLICATION: (
        Change(
            "publication.path",
            "set delta where the link is slow: only what changed is sent.",
            lambda path: path != "delta",
        ),
        Change(
            "publication.commit",
            "set shadow where memory allows: generation goes on during the transfer.",
            lambda commit: commit != "shadow",
        ),
        Change("model.lora", "train an adapter: only the adapter is published.", none_helps=True),
        Change("", "see which member is slow: the event `publication.done` has the seconds of each."),
    ),
    Bottleneck.QUEUE: (
        Change("", "see why replicas take no prompts: `millrace fleet`, `millrace logs`."),
        Change("rollout.lease_s", "lower it, so that prompts of a lost replica are issued again sooner."),
    ),
    Bottleneck.MEMORY: (
        Change("rollout.engine_options", "leave more memory free: lower `gpu_memory_utilization`."),
        Change("trainer.activation_recompute", "switch it on, and raise trainer.token_budget again.", _is_off),
        Change("trainer.backend_options", "offload to host memory or use more ranks: docs/memory.md."),
    ),
    Bottleneck.STALENESS_BOUND: (
        Change(
            "schedule.max_staleness",
            "set it to 1: engines generate the next step while the last answers end.",
            _is_off,
        ),
        Change("rollout.max_response_tokens", _SHORTER, _more_than_1),
    ),
    Bottleneck.EVALUATION: (
        Change("evaluation.every_steps", "raise it, to evaluate less often.", _is_set),
        Change("evaluation.prompts", "lower it, to evaluate on fewer prompts.", _more_than_1),
    ),
    Bottleneck.CHECKPOINT: (
        Change(
            "schedule.save_in_background", "set it to true: training goes on while a checkpoint is written.", _is_off
        ),
        Change("schedule.save_every_steps", "raise it, to save less often.", _is_set),
        Change("", "write checkpoints to a faster disk: `output`."),
    ),
}
