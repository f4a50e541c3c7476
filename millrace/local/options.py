"""What a local stack consists of, and from that the command line and environment of each of its processes. Pure."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace.engines import ENGINES, unknown_engine
from millrace.errors import InvalidState
from millrace.local.folders import socket_in
from millrace.local.host import visible_devices
from millrace.wire.tls import scheme

LEASE_OVER_S = 4.0
"""How long a coordinator of several that died is not started again: by default its lease has run out by then, and one
that stands by leads. At the same ports it would take its lease back, and the job would wait for all of its start."""


@dataclass(frozen=True)
class StackOptions:
    """One local stack."""

    state: str
    """Folder for Redis' data, logs and what the coordinator keeps; a stack started on it again goes on from there."""
    replicas: int = 1
    autoscale: str = ""
    """MIN:MAX, if the coordinator scales the replicas; `replicas` is then the number at the start."""
    ranks: int = 1
    engine: str = "vllm"
    """Engine of the replicas; of several, `vllm,sglang`, each replica takes the next."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreter of the replicas with an engine, if it is not this one: engines whose requirements exclude each
    other have a virtual environment each."""
    gpus_per_replica: int = 1
    """For engines that the job's `engine_options` spread over several."""
    share_gpus: bool = False
    """Ranks and replicas share GPUs if there are fewer than they ask for."""
    partition: str = ""
    """Partition of the fleet that trainer and replicas work in; empty: the default one."""
    standby: bool = True
    """A second launcher of the trainer is kept, which has imported and waits until the first one has ended. Not beside
    standby trainers."""
    standby_trainers: int = 0
    """Trainers that hold the job beside the one in the seat, each with `ranks` ranks."""
    http_port: int = 7700
    grpc_port: int = 7600
    standby_coordinators: Sequence[Sequence[int]] = field(default_factory=list)
    """Ports of REST and gRPC of each coordinator beside the first one. One of all leads, the others stand by."""
    http_host: str = "127.0.0.1"
    """Address that REST is served on. The services talk to each other over the loopback."""
    insecure: bool = False
    """REST may be served to other hosts without a token."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For all services, over the supervisor's own."""

    def __post_init__(self) -> None:
        named = [*(("--engine", name) for name in self.engines), *(("--python", name) for name in self.pythons)]
        if unknown := [unknown_engine(option, name) for option, name in named if name not in ENGINES]:
            raise InvalidState(unknown[0].what, unknown[0].fix)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StackOptions":
        return cls(**json.loads(text))

    @property
    def ports(self) -> list[tuple[int, int]]:
        """Ports of REST and gRPC of each coordinator."""
        return [(self.http_port, self.grpc_port), *((http, grpc) for http, grpc in self.standby_coordinators)]

    @property
    def url(self) -> str:
        """URL of each coordinator's REST API, with commas, as MILLRACE_URL has them."""
        host = "127.0.0.1" if self.http_host in ("0.0.0.0", "::") else self.http_host
        return ",".join(f"{scheme()}://{host}:{http}" for http, _ in self.ports)

    @property
    def coordinator(self) -> str:
        """host:port of each coordinator's gRPC server, with commas, as MILLRACE_COORDINATOR has them."""
        return ",".join(f"127.0.0.1:{grpc}" for _, grpc in self.ports)

    @property
    def engines(self) -> list[str]:
        return [name.strip() for name in self.engine.split(",")]

    @property
    def folder(self) -> Path:
        return Path(self.state)


@dataclass(frozen=True)
class Service:
    """One process of the stack."""

    name: str
    """redis, coordinator, coordinator-1, trainer, trainer-1, rollout-0, rollout-1, ..."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    vital: bool
    """Without it the stack is of no use; the last replica is vital too."""
    grace_s: float
    """How long it may take to stop when asked."""
    standby: bool = False
    """Whether a second process of it is kept that has imported and waits: see `millrace.local.launcher.stand_by`."""
    least_wait_s: float = 0.0
    """Least seconds between its death and its next start."""

    @property
    def kind(self) -> str:
        """Services of the same kind can stand in for each other."""
        return self.name.partition("-")[0]


LOCAL = {"MILLRACE_HOST": "127.0.0.1"}
"""The services are reached over the loopback."""


def services(options: StackOptions, devices: Sequence[str] = (), redis_url: str = "") -> list[Service]:
    """The stack's processes in the order in which they start; they stop in the opposite one.

    `devices` are the CUDA devices to share out, none on a host without. `redis_url`: the Redis that the coordinators
    use by their environment; empty: the stack has its own. Raises InvalidState if the devices do not suffice.
    """
    coordinator, python = options.coordinator, sys.executable
    environment = {**LOCAL, "MILLRACE_STACK_STATE": str(options.folder.absolute()), **options.environment}
    if options.partition:
        environment["MILLRACE_PARTITION"] = options.partition
    trainers = 1 + options.standby_trainers
    wanted = [*[options.ranks] * trainers, *[options.gpus_per_replica] * options.replicas]
    shares = share_out(devices, wanted, shared=options.share_gpus, trainers=trainers)

    def trainer(number: int, visible: Mapping[str, str]) -> Service:
        module = (python, "-m", "services.trainer.launch")
        argv = (*module, "--ranks", str(options.ranks), "--coordinator", coordinator)
        standby = options.standby and not options.standby_trainers
        name = f"trainer-{number}" if number else "trainer"
        return Service(name, argv, {**environment, **visible}, vital=True, grace_s=20.0, standby=standby)

    def replica(number: int, visible: Mapping[str, str]) -> Service:
        engine = options.engines[number % len(options.engines)]
        module = (options.pythons.get(engine, python), "-m", "services.rollout.launch")
        argv = (*module, "--coordinator", coordinator, "--engine", engine, "--port", "0")
        return Service(f"rollout-{number}", argv, {**environment, **visible}, vital=False, grace_s=20.0)

    return [
        *_coordinators(options, environment, redis_url),
        *(trainer(number, visible) for number, visible in enumerate(shares[:trainers])),
        *(replica(number, visible) for number, visible in enumerate(shares[trainers:])),
    ]


def of_this_host(options: StackOptions) -> list[Service]:
    """Processes of the stack with the CUDA devices and REDIS_URL of this host. Raises InvalidState as `services`."""
    return services(options, visible_devices(), {**os.environ, **options.environment}.get("REDIS_URL", ""))


def _coordinators(options: StackOptions, environment: Mapping[str, str], redis_url: str) -> list[Service]:
    """The coordinators. A single one runs the Redis of the stack itself; several share a Redis, which comes first."""
    folder = options.folder / "coordinator"
    state = ("--http-host", options.http_host, "--state-dir", str(folder))
    secure = ("--insecure",) if options.insecure else ()
    scaled = ("--autoscale", options.autoscale) if options.autoscale else ()
    least_wait_s, redis = 0.0, []
    if options.standby_coordinators:
        least_wait_s = LEASE_OVER_S
        if not redis_url:
            argv = (sys.executable, "-m", "services.coordinator.redis_server", "--state-dir", str(folder))
            redis = [Service("redis", argv, environment, vital=True, grace_s=15.0)]
            environment = {**environment, "REDIS_URL": f"unix://{socket_in(folder / 'redis', 'redis.sock')}"}

    def coordinator(number: int, http: int, grpc: int) -> Service:
        module = (sys.executable, "-m", "services.coordinator")
        argv = (*module, "--http-port", str(http), "--grpc-port", str(grpc), *state, *secure, *scaled)
        name = f"coordinator-{number}" if number else "coordinator"
        return Service(name, argv, environment, vital=True, grace_s=15.0, least_wait_s=least_wait_s)

    return [*redis, *(coordinator(number, *ports) for number, ports in enumerate(options.ports))]


def share_out(
    devices: Sequence[str], wanted: Sequence[int], *, shared: bool = False, trainers: int = 1
) -> list[dict[str, str]]:
    """Environment that gives each process as many devices as it wants, one after the other; if `shared`, the first
    again after the last. The first `trainers` of `wanted` are trainers, the others replicas. NCCL takes no two ranks of
    one host on one device, so processes that share seem to be on hosts of their own: between them weights go over
    sockets.

    Raises InvalidState if there are devices but too few.
    """
    if not devices:
        return [{} for _ in wanted]
    if max(wanted) > len(devices) or (sum(wanted) > len(devices) and not shared):
        need = f"{sum(wanted[:trainers])} ranks and {len(wanted) - trainers} replicas need {sum(wanted)} CUDA devices"
        raise InvalidState(
            f"{need}, this host shows {len(devices)}: {', '.join(devices)}.",
            "start fewer, let them share with --share-gpus, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU.",
        )
    environments, first = [], 0
    for number, count in enumerate(wanted):
        own = [devices[(first + i) % len(devices)] for i in range(count)]
        host = {"NCCL_HOSTID": f"millrace-{number}"} if sum(wanted) > len(devices) else {}
        environments.append({"CUDA_VISIBLE_DEVICES": ",".join(own), **host})
        first += count
    return environments


def pythons(given: Sequence[str]) -> dict[str, str]:
    """From `ENGINE=PATH` each. Raises InvalidState for anything else."""
    found = dict(each.partition("=")[::2] for each in given)
    if wrong := [engine for engine, path in found.items() if not Path(path).is_file()]:
        what = f"--python: {wrong[0]}={found[wrong[0]]} names no interpreter."
        raise InvalidState(what, "write ENGINE=PATH, as sglang=/venvs/sglang/bin/python.")
    return found
