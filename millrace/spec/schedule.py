"""How long a job runs, how far generation may run ahead, what is kept, and how long an operation may take."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from millrace.spec.pool import LONGEST_NAME, NAME
from millrace.trackers import TRACKERS
from millrace.validation import limits
from millrace.validation.fields import OneOf, StrictModel
from millrace.validation.secrets import SecretReference
from millrace.wire.deadlines import COMMIT_S, DEADLINES_S, FINISH_S

HELD_OUT = "evaluation/held_out"
"""The step metric that is shown as held-out score."""
OF_EVALUATIONS = ("evaluation/", "val-core/", "val-aux/")
"""What the names of metrics of evaluations begin with."""


StalenessOf = Literal["oldest", "mean", "versions"]
"""What `schedule.max_staleness` bounds of a trajectory."""


class StopWhen(StrictModel):
    """When a job ends before its last step. It then saves and evaluates as after any last step, and has succeeded."""

    metric: str = HELD_OUT
    """The step metric that is looked at (docs/metrics.md), one of which larger values are better. Steps without it,
    such as those without an evaluation, do not end the job."""
    solved_at: float | None = Field(None, ge=-limits.LARGEST_WEIGHT, le=limits.LARGEST_WEIGHT)
    """The job is solved when the metric has at least this value; null: it is not looked at."""
    flat_steps: int | None = Field(None, ge=1, le=10_000)
    """The job is flat when the best value in this many steps is at most `flat_change` above the best value in as many
    steps before them; null: it is not looked at."""
    flat_change: float = Field(0.005, ge=0.0, le=limits.LARGEST_WEIGHT)
    """Rise of the best value that counts as learning."""


class Schedule(StrictModel):
    steps: int | None = Field(None, ge=0, le=limits.MOST_STEPS)
    """Steps to train; null: as many as `passes` over the data give. 0: the model is only evaluated."""
    passes: int = Field(1, ge=1, le=limits.MOST_STEPS)
    """Passes over the data. With `steps`, the data is repeated as often as needed instead."""
    prompts_per_step: int = Field(64, ge=1, le=limits.MOST_IN_FLIGHT)
    """Groups that are trained in one step; a group is all answers to one prompt."""
    max_staleness: int = Field(1, ge=0, le=1000)
    """How many versions a trajectory may be behind the trainer, as `staleness_of` counts; 0: strictly on-policy.
    Prompts of this number of steps, and of one more, are in flight at the same time."""
    staleness_of: StalenessOf = "oldest"
    """What is bounded of a trajectory. oldest: how far its oldest token is behind. mean: how far its tokens are behind
    on average. versions: how many versions after its first one have sampled tokens of it, whatever their age."""
    too_stale: Literal["regenerate", "drop", "train"] = "regenerate"
    """What becomes of a group with a trajectory beyond `max_staleness`. regenerate: its prompt is issued again. drop:
    it is dropped, and another prompt takes its place. train: it is trained, and algorithm.correction weighs its tokens
    by how likely they still are."""
    carried_prompts: int = Field(0, ge=0, le=limits.MOST_IN_FLIGHT)
    """Prompts that are in flight beyond those of `max_staleness`. A step closes when it has enough groups; unfinished
    answers go on in the next step, so that the engines are never empty. Those answers have tokens of more versions."""
    wait_for_slow: bool = False
    """true: a step trains the prompts that were issued first, and waits for them, so that short answers are not trained
    sooner than long ones. false: it trains those that are complete first."""
    save_every_steps: int = Field(0, ge=0, le=limits.MOST_STEPS)
    """Steps between two checkpoints. The last step is always saved; 0, or more than there are steps: only the last."""
    keep_checkpoints: int = Field(2, ge=1, le=10_000)
    """Number of checkpoints that are kept, the newest ones."""
    keep_checkpoints_days: float | None = Field(None, ge=0.001, le=100_000.0)
    """Days after which a checkpoint is deleted although it is one of the newest, as soon as there is a newer one; null:
    only their number counts."""
    checkpoint_store: str | None = Field(None, max_length=1024, examples=["s3://checkpoints/team"])
    """URL of an object store (s3://, gs://, abfs://, file://), below one of MILLRACE_CHECKPOINT_STORES. The coordinator
    copies each checkpoint there as {id}/step-N, with its own rights, and removes the copy with the checkpoint. A job
    that continues without the folder fetches it. null: none is copied."""
    keep_best: str | None = None
    """Step metric by which the best checkpoint is kept in addition to the newest, the one with the largest value, as
    evaluation/held_out; with - before its name the one with the smallest. `checkpoints/best` is a link to it. A
    checkpoint counts if its step has the metric: evaluate at the steps that are saved. null: only the newest."""
    stop_when: StopWhen | None = Field(None, examples=[{"solved_at": 0.95}])
    """When the job ends before its last step; null: it trains all steps."""
    partition: str | None = Field(None, max_length=LONGEST_NAME, pattern=NAME, examples=["team-a"])
    """The partition of the fleet in which the job has to run: its trainer and replicas were started with `--partition`
    (docs/several-jobs.md). null: any whose members can run it."""
    priority: int = Field(0, ge=-1000, le=1000)
    """Jobs with a higher number leave the queue sooner. A job that runs goes on, but for `preempt`."""
    preempt: bool = False
    """true: while this job waits for its turn, a job of a lower priority that runs where it could run gives way after
    its step: it saves a checkpoint and goes back to the queue. The coordinator has to allow it by `--preempt-after-s`
    (docs/several-jobs.md)."""
    share: float = Field(1.0, ge=0.01, le=1000.0)
    """This job's share of the replicas that running jobs share, in relation to the others': with 2 it gets twice as
    many as one with 1, as far as it has work for them. The coordinator has to allow it by `--share-replicas-s`
    (docs/several-jobs.md)."""
    save_in_background: bool = True
    """true: training continues while a checkpoint is written from a copy in host memory, which takes 12 bytes a
    parameter over all ranks. false: training waits for the disk."""


Seconds = Annotated[float, Field(ge=limits.SHORTEST_S, le=limits.LONGEST_S)]


class Deadlines(StrictModel):
    """Longest time, in seconds, for each remote operation. An operation that takes longer is named in an event, and is
    retried or fails the job. millrace/wire/deadlines.py has those that no job needs to change."""

    configure_s: Seconds = 1800.0
    """Loading the model, in the trainer and in an engine."""
    step_s: Seconds = 3600.0
    """One step of the trainer."""
    publication_s: Seconds = 300.0
    """Transferring new weights and verifying them."""
    save_s: Seconds = 3600.0
    """Writing one checkpoint, or copying the state to a trainer that stands by."""
    no_replica_s: Seconds = 1800.0
    """How long a job waits without any replica before it fails."""

    def of_calls(self) -> dict[str, float]:
        """The deadlines of calls that are made for the job."""
        return DEADLINES_S | {
            "Rollout/Configure": self.configure_s,
            "Scoring/Configure": self.configure_s,
            "Trainer/Configure": self.configure_s,
            "Trainer/Load": self.configure_s,
            "Trainer/AddPart": self.step_s,
            "Trainer/Step": self.step_s,
            "Rollout/VerifyPublication": self.publication_s + COMMIT_S,
            "Rollout/TransferCopy": self.publication_s,
            "Trainer/TransferPublication": self.publication_s,
            "Trainer/Save": self.save_s,
            "Trainer/FinishSave": self.save_s + FINISH_S,
            "Trainer/CopyState": self.save_s,
            "Trainer/ReceiveState": self.save_s + FINISH_S,
        }


class Tracking(StrictModel):
    trackers: list[Annotated[str, OneOf(tuple(TRACKERS))]] = Field(default_factory=list, examples=[["tensorboard"]])
    """Experiment trackers. The `trackers` extra installs them on the coordinator's host: docs/running.md."""
    project: str = "millrace"
    """Project in Weights & Biases, experiment in MLflow."""
    api_key: SecretReference | None = Field(None, examples=["env:TEAM_WANDB_KEY"])
    """The place of the key of Weights & Biases, on the coordinator: `env:NAME` or `file:/path`. null: the coordinator's
    WANDB_API_KEY."""
    offline: bool = False
    """true: Weights & Biases and MLflow write into the output folder and send nothing: docs/running.md."""
    samples_per_step: int = Field(4, ge=0, le=1000)
    """Groups of each step that are kept for GET /v1/jobs/{id}/samples and sent to the trackers."""
    samples_kept: int = Field(2000, ge=1, le=2_000_000)
    """Trajectories of the whole job that are kept, the newest ones. Redis holds their prompts and answers."""


WebhookReason = Literal["succeeded", "failed", "cancelled", "stalled"]


class Webhook(StrictModel):
    url: str = Field(max_length=2048, pattern=r"^(https?://[!-~]+|env:[A-Za-z_][A-Za-z0-9_]*|file:/[^\x00-\x1f]+)$")
    """The URL to which messages are sent by POST: `https://HOST/PATH`, or the place of a secret URL on the coordinator:
    `env:NAME` or `file:/path`. Redirects are not followed. Internal addresses, and http, need
    MILLRACE_WEBHOOK_HOSTS on the coordinator (docs/security.md)."""
    secret: SecretReference | None = Field(None, examples=["env:TEAM_WEBHOOK_KEY"])
    """The place of the key that signs the messages, on the coordinator: `env:NAME` or `file:/path`. null: they are not
    signed."""
    when: list[WebhookReason] = Field(
        default_factory=lambda: list(get_args(WebhookReason)), min_length=1, examples=[["failed", "stalled"]]
    )
    """What messages are sent about: how the job ended, and that it has trained no step for `stalled_s`."""
    stalled_s: Seconds = 3600.0
    """Seconds without a step, in which the job was not paused, after which it counts as stalled. Told once a step."""


class Publication(StrictModel):
    path: Literal["auto", "sharded", "delta", "gather_broadcast"] = "auto"
    """sharded: every replica gets exactly the slices that it needs, from the ranks that hold them. delta: as sharded,
    but only what changed since the version that the replicas hold is sent; the trainer keeps that version in host
    memory. gather_broadcast: each tensor is gathered on one rank and broadcast. auto: sharded if the trainer and all
    replicas support it, and delta if that takes longer than a second and delta was measured to be faster."""
    commit: Literal["auto", "shadow", "inplace"] = "auto"
    """shadow: weights are received into spare memory while requests run, and the pause is a copy on the device.
    inplace: generation is paused during the transfer, which needs no spare memory. auto: shadow if there is enough
    memory."""
