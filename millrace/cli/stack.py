"""`millrace up`: the local stack in the foreground. `millrace scale`: more or fewer replicas of one that runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.engines import ENGINE_NAMES
from millrace.errors import InvalidState
from millrace.local.child_processes import watchdog
from millrace.local.options import StackOptions, pythons
from millrace.local.ports import free_port
from millrace.local.state_folder import is_running, read_state, span
from millrace.local.state_folder import scale as ask_for

MOST_REPLICAS = 64
MOST_COORDINATORS = 4
MOST_STANDBYS = 4
STATE = Path("state")
ReplicasOption = Annotated[
    str, typer.Option(help="Rollout replicas; MIN:MAX: the coordinator scales them.", metavar="N or MIN:MAX")
]
PythonOption = Annotated[
    list[str] | None,
    typer.Option(metavar="ENGINE=PATH", help="Python interpreter for replicas of an engine. Can be repeated."),
]
StandbyTrainersOption = Annotated[
    int,
    typer.Option(
        help="Trainers that hold the job and its newest state, to go on within seconds. Each has --ranks ranks.",
        min=0,
        max=MOST_STANDBYS,
    ),
]
CoordinatorsOption = Annotated[
    int,
    typer.Option(help="Coordinators: one leads, the others stand by, at the next ports.", min=1, max=MOST_COORDINATORS),
]
StateOption = Annotated[
    Path,
    typer.Option(help="Folder for data and logs. A stack that is started on it again continues from there."),
]


def up(
    context: typer.Context,
    replicas: ReplicasOption = "1",
    ranks: Annotated[int, typer.Option(help="Number of trainer ranks.", min=1, max=64)] = 1,
    engine: Annotated[
        str, typer.Option(help=f"Of the replicas: {', '.join(ENGINE_NAMES)}; or several with commas.")
    ] = "vllm",
    python: PythonOption = None,
    gpus_per_replica: Annotated[int, typer.Option(help="For engines that use several GPUs.", min=1)] = 1,
    share_gpus: Annotated[
        bool, typer.Option(help="Share GPUs if there are too few. The engines have to leave memory free.")
    ] = False,
    partition: Annotated[str, typer.Option(help="Partition of the fleet for trainer and replicas.")] = "",
    standby: Annotated[
        bool, typer.Option(help="Keep a second trainer process that has imported everything, about 0.4 GB.")
    ] = True,
    standby_trainers: StandbyTrainersOption = 0,
    coordinators: CoordinatorsOption = 1,
    state: StateOption = STATE,
    http_host: Annotated[str, typer.Option(help="Address of the REST API; 0.0.0.0 allows other hosts.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="Port of the REST API; 0: a free port.")] = 7700,
    grpc_port: Annotated[int, typer.Option(help="Port at which the fleet registers; 0: a free port.")] = 7600,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="MILLRACE_INSECURE", help="Serve other hosts without a token.")
    ] = False,
) -> None:
    """Start the whole system on this machine: coordinator with its Redis, trainer, replicas.

    The command stays in the foreground and shows warnings and errors of all services; the full logs are in STATE/logs.
    A service that dies is started again, a limited number of times. Ctrl-C stops all services in order and leaves no
    process behind; a second Ctrl-C does not wait. If a stack runs on STATE already, --replicas changes the number of
    its replicas, as `millrace scale` does.
    """
    number, between = _number(replicas)
    if is_running(state):
        return _change_running(state, number, between, context)
    from millrace.wire.address import require_protection  # imports gRPC

    require_protection(http_host, insecure=insecure)
    first, *others = coordinator_ports(coordinators, http_port, grpc_port)
    options = StackOptions(
        state=str(state.resolve()),
        replicas=number,
        autoscale=between,
        ranks=ranks,
        engine=engine,
        pythons=pythons(python or []),
        gpus_per_replica=gpus_per_replica,
        share_gpus=share_gpus,
        partition=partition,
        standby=standby,
        standby_trainers=standby_trainers,
        http_host=http_host,
        http_port=first[0],
        grpc_port=first[1],
        standby_coordinators=others,
        insecure=insecure,
    )
    raise typer.Exit(watchdog((sys.executable, "-m", "millrace.local", "supervise", options.to_json())))


def scale(
    replicas: Annotated[int, typer.Argument(help="Number of rollout replicas.", min=0, max=MOST_REPLICAS)],
    state: Annotated[Path, typer.Option(help="Folder of the stack, as `millrace up --state` has it.")] = STATE,
) -> None:
    """Start or drain replicas of the running local stack, until there are REPLICAS of them.

    A new replica gets the weights from a sibling. One that is superfluous finishes the leases that it has and leaves;
    those with the highest numbers go. Each GPU has one replica, unless the stack was started with --share-gpus.
    """
    if is_running(state) and (between := read_state(state).get("autoscale")):
        what = f"the stack on {state} scales its replicas itself, between {between}."
        raise InvalidState(what, f"stop it, and start it with --replicas {replicas}.")
    changed = ask_for(state.resolve(), replicas)
    typer.echo(
        f"{', '.join(changed)}: start or drain; `millrace fleet` shows them." if changed else "nothing to change."
    )


def _number(replicas: str) -> tuple[int, str]:
    """The number of replicas at the start, and MIN:MAX if they are scaled. Raises InvalidState."""
    found = span(replicas, MOST_REPLICAS)
    if found is None:
        what = f"--replicas: {replicas!r} is neither a number nor MIN:MAX."
        raise InvalidState(what, f"write numbers from 0 to {MOST_REPLICAS}, the first one at most the second.")
    return found[0], replicas if ":" in replicas else ""


def coordinator_ports(coordinators: int, http_port: int, grpc_port: int) -> list[tuple[int, int]]:
    """Ports of REST and gRPC of each coordinator: those that are given and the next ones, free ones for 0. Raises
    InvalidState if two are the same."""
    https, grpcs = [
        [first + number if first else free_port() for number in range(coordinators)] for first in (http_port, grpc_port)
    ]
    if both := sorted(set(https) & set(grpcs)):
        what = f"--grpc-port: {grpc_port}: port {both[0]} would be for gRPC and for REST."
        raise InvalidState(what, f"choose ports that are at least {coordinators} apart, or 0 for free ones.")
    return list(zip(https, grpcs, strict=True))


def _change_running(state: Path, replicas: int, between: str, context: typer.Context) -> None:
    """`millrace up` on a state folder whose stack runs already."""
    if between:
        what = f"another stack runs on the state folder {state}."
        raise InvalidState(what, "stop it, then start it with --replicas MIN:MAX.")
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if others := sorted(given - {"replicas", "state"}):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        what = f"another stack runs on the state folder {state}, whose {options} cannot be changed while it runs."
        raise InvalidState(what, "stop it first, or give --state another folder.")
    if "replicas" not in given:
        what = f"another stack runs on the state folder {state}."
        raise InvalidState(what, "stop it, give --state another folder, or give --replicas to change its replicas.")
    scale(replicas, state)
