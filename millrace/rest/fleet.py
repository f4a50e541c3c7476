"""The fleet in the answers of the REST API: members, and what each uses of its hosts."""

from enum import StrEnum

from pydantic import BaseModel, Field

from millrace.sandbox.boundaries import Boundary

DEFAULT_PARTITION = "default"
"""The partition of members that name none, and of jobs that began when there was no other."""


class MemberKind(StrEnum):
    TRAINER = "trainer"
    ROLLOUT = "rollout"


class MemberState(StrEnum):
    IDLE = "idle"
    """No job needs it."""
    CONFIGURING = "configuring"
    """It loads the model of the job: a trainer, or a replica with its engine."""
    JOINING = "joining"
    """The engine of the replica is ready; it holds no verified version of the job's weights yet."""
    SERVING = "serving"
    DRAINING = "draining"
    """It gets no new work and leaves when it has finished what it has."""
    LEFT = "left"
    """It was drained and left a short time ago."""
    LOST = "lost"
    """It died, or left without being drained, a short time ago."""


class HostView(BaseModel):
    """Memory of a member's host."""

    host: str
    process_bytes: int = Field(description="Resident memory of the member's processes; shared pages count for each.")
    used_bytes: int = Field(description="Memory that all processes of the host use, without its file cache.")
    size_bytes: int


class GpuView(BaseModel):
    """A GPU that a member may use, with the work of all processes on it. What it does not report is null."""

    host: str
    gpu: str = Field(description="Number of the GPU on its host.")
    used_bytes: int
    size_bytes: int
    busy: float | None = Field(description="Part of the last moment in which it ran a kernel, 0 to 1.")
    power_w: float | None = Field(description="Watts.")
    temperature_c: float | None = Field(description="Degrees Celsius.")


class MemberView(BaseModel):
    id: str
    kind: MemberKind
    pool: str = Field("", description="The pool of a replica; `rollout` for those that generate.")
    partition: str = Field("", description="The partition of the fleet that it works in for its whole life.")
    address: str
    engine: str
    engine_release: str
    world_size: int
    host: str
    device: str
    metrics_address: str = Field("", description="host:port of its Prometheus metrics; empty: it serves none.")
    sessions_address: str = Field("", description="host:port at which agents reach their sessions; empty: nowhere.")
    state: MemberState
    version: int = Field(description="Weight version held; -1: none verified.")
    running: int = Field(description="Samples that its engine is generating.")
    waiting: int = Field(description="Samples that wait in its engine.")
    free: int = Field(description="Samples that its engine could start now.")
    leases: int = Field(description="Prompts that it works on.")
    tokens: int = Field(description="Tokens generated since it started.")
    tokens_per_s: float
    cache_used: float | None = Field(
        None, description="Part of the engine's cache that running requests hold, 0 to 1; null: not known."
    )
    hosts: list[HostView] = Field([], description="Memory of its hosts; of a replica on several hosts the leader's.")
    gpus: list[GpuView] = Field([], description="Its GPUs; empty if there are none or NVML does not tell.")
    silent_s: float = Field(description="Seconds since its last heartbeat, request or answer.")
    trouble: str = Field("", description="Why it could not be configured for the job.")
    gone: str = Field("", description="Why it is lost or has left.")
    missing_boundaries: dict[Boundary, str] = Field(
        default_factory=dict, description="What the sandbox of the job's reward functions lacks on its host, and why."
    )


class FleetView(BaseModel):
    epoch: int = Field(description="Membership epoch: grows when a member joins, leaves or is lost.")
    trainers: list[MemberView]
    replicas: list[MemberView]


class LogLineView(BaseModel):
    time: str = Field(description="ISO 8601, in UTC.")
    level: str
    message: str
    details: str = Field(description="Values of the line as `name=value`, and below them the traceback of an error.")


class LogView(BaseModel):
    """The newest lines that a service has logged."""

    member: str
    lines: list[LogLineView] = Field(description="The oldest first.")
