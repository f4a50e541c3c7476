"""The job spec: one tree with everything that a user says about a job."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from millrace.spec.algorithm import Algorithm
from millrace.spec.migrations import migrated
from millrace.spec.model import Data, Evaluation, Model, Reward
from millrace.spec.pool import Pool, PoolTask
from millrace.spec.rollout import Rollout
from millrace.spec.schedule import Deadlines, Publication, Schedule, Tracking, Webhook
from millrace.spec.trainer import Trainer
from millrace.validation.fields import StrictModel

Tag = Annotated[str, Field(min_length=1, max_length=50, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]
"""At most 50 letters, digits, `.`, `_`, `:` and `-`."""
PLACEHOLDER = re.compile(r"\{(\w*)\}")
PLACEHOLDERS = ("name", "id", "date", "runs")
"""What `output` may have in braces."""


class JobSpec(StrictModel):
    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")
    """Name of the job for people: at most 100 letters, digits, `.`, `_`, `-` and spaces."""
    output: str = "{runs}/{name}-{id}"
    """Absolute path of the folder for checkpoints and the report, the same for coordinator and trainer. `{name}` stands
    for the name of the job, `{id}` for its id, `{date}` for the day of its submission, as 2026-01-31. `{runs}` stands
    for the folder that MILLRACE_RUNS names in the coordinator's environment, by default `~/millrace/runs`. A folder
    belongs to one job, with the folders in it until that job has ended."""
    tags: list[Tag] = Field(default_factory=list, max_length=20, examples=[["sweep-1", "baseline"]])
    """Words by which the job is found again: `millrace jobs --tag baseline`."""
    notes: str = Field("", max_length=10_000)
    """What people want to know of the job later. `millrace note JOB` changes notes and tags of any job."""
    model: Model = Field(examples=[{"path": "/data/models/Qwen3-0.6B"}])
    """The model that is trained."""
    data: Data = Field(examples=[{"files": ["/data/train.parquet"]}])
    """The prompts that the model answers."""
    reward: Reward = Field(Reward(), examples=[{"function": "math"}])
    """How the answers are scored."""
    rollout: Rollout = Field(Rollout(), examples=[{"samples_per_prompt": 8, "max_response_tokens": 1024}])
    """How the answers are generated."""
    pools: list[Pool] = Field(
        default_factory=list, max_length=16, examples=[[{"name": "quality", "path": "/data/reward-model"}]]
    )
    """Replicas with models of their own that score: reward models, judges, and teachers."""
    algorithm: Algorithm = Field(Algorithm(), examples=[{"preset": "grpo"}])
    """What is optimised."""
    trainer: Trainer = Field(Trainer(), examples=[{"backend": "fsdp2", "token_budget": 16384}])
    """How the model is trained."""
    publication: Publication = Field(Publication(), examples=[{"path": "auto"}])
    """How new weights reach the replicas."""
    schedule: Schedule = Field(Schedule(), examples=[{"steps": 100, "prompts_per_step": 64}])
    """How long the job runs, how far generation may run ahead of training, and which checkpoints are kept."""
    evaluation: Evaluation | None = Field(None, examples=[{"files": ["/data/held_out.parquet"]}])
    """Held-out prompts for evaluation during training; null: no evaluation."""
    deadlines: Deadlines = Field(Deadlines(), examples=[{"step_s": 3600}])
    """How long each remote operation may take."""
    tracking: Tracking = Field(Tracking(), examples=[{"trackers": ["tensorboard"]}])
    """Which experiment trackers get the job's step metrics and samples."""
    webhooks: list[Webhook] = Field(
        default_factory=list, max_length=8, examples=[[{"url": "https://hooks.example.com/millrace"}]]
    )
    """Addresses that get a message when the job ends, fails or stands still."""

    @model_validator(mode="before")
    @classmethod
    def _of_any_release(cls, tree: Any) -> Any:
        """Reads specs of earlier releases too."""
        return migrated(tree) if isinstance(tree, Mapping) else tree

    def without_defaults(self) -> str:
        """The fields that differ from their defaults, as JSON. A service of an earlier release refuses fields that it
        does not know, and so takes every job that does not use one."""
        short = self.model_dump_json(exclude_defaults=True)
        # A default that says something else than a missing field, which a preset could fill, has to be sent.
        return short if JobSpec.model_validate_json(short) == self else self.model_dump_json()

    def pool(self, name: str) -> Pool | None:
        """The pool of that name; None if there is none."""
        return next((pool for pool in self.pools if pool.name == name), None)

    def pool_tasks(self, name: str) -> set[PoolTask]:
        """What the job uses a pool for: one task, in a job that follows the rules."""
        tasks = {PoolTask.REWARDS for each in self.reward.functions if each.pool == name}
        tasks |= {PoolTask.REPLIES for term in self.reward.judge_terms if term.judge.pool == name}
        distillation = self.algorithm.distillation
        return tasks | ({PoolTask.LOGPROBS} if distillation is not None and distillation.pool == name else set())


class Notes(StrictModel):
    """New tags and notes of a job."""

    tags: list[Tag] | None = Field(None, max_length=20)
    """null: they stay."""
    notes: str | None = Field(None, max_length=10_000)
    """null: they stay."""
