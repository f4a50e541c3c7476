"""Starts a replica on this host: `python -m services.rollout.launch --coordinator HOST:PORT --engine vllm`.

A replica that ends is started again, within a second, from a process that has imported it and its engine
(`millrace/local/launcher.py`). Engines whose processes can be forked from there too do not import anything again.

This process imports no torch. SIGTERM and SIGINT are passed on to the replica, which drains.
"""

from collections.abc import Sequence
from functools import partial
from multiprocessing.context import ForkServerProcess

import typer

from millrace.engines import ENGINES
from millrace.errors import MillraceError
from millrace.local.launcher import FORKING, RESTARTS, Launcher, fork_from
from millrace.local.ports import free_port
from millrace.service_process import VersionOption, ends_with_message
from millrace.telemetry import logs
from millrace.wire import last_words
from millrace.wire.address import HostOption, InsecureOption, advertise, bind_address, host_address, require_protection
from services.rollout.engines import probe
from services.rollout.nodes.place import EngineOption, LeaderOption, NodeRankOption, NodesOption, Place, PortOption

PRELOADED = ["services.rollout.__main__", "services.rollout.process"]
"""What is imported before a replica is forked, after what its engine's descriptor names. None of it starts a thread or
CUDA."""
app = typer.Typer(pretty_exceptions_enable=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def main(
    context: typer.Context,
    engine: EngineOption = "vllm",
    host: HostOption = "",
    port: PortOption = 0,
    nodes: NodesOption = 1,
    node_rank: NodeRankOption = 0,
    leader: LeaderOption = "",
    insecure: InsecureOption = False,
    version: VersionOption = False,
) -> None:
    """Runs a replica, and starts it again when it ends. Takes all options of `python -m services.rollout`."""
    advertise(host)
    logs.configure("rollout", "launcher")
    with ends_with_message("rollout"):
        require_protection(bind_address(host_address()), insecure=insecure)
        found = probe(engine)
        if not found.ok:
            raise MillraceError(f"engine {engine} cannot run here: {found.why}")
        place = Place.of(engine, nodes, node_rank, leader)
    fork_from(*ENGINES[engine].preloaded, *PRELOADED)
    # The port is the same in every life: the coordinator removes a dead replica as soon as another one has its address.
    options = ["--engine", engine, *(["--insecure"] if insecure else [])]
    if place is None:
        options += ["--port", str(port or free_port())]
    else:
        options += ["--port", str(port), "--leader", leader, "--nodes", str(nodes), "--node-rank", str(node_rank)]
    raise typer.Exit(Launcher(partial(life, [*context.args, *options]), RESTARTS).run())


def life(arguments: Sequence[str]) -> list[ForkServerProcess]:
    """The replica's process, which is not started yet. `arguments`: those of `python -m services.rollout`."""
    return [FORKING.Process(target=_replica, args=(arguments,), name="the replica")]


def _replica(arguments: Sequence[str]) -> None:
    """The replica, in its own process."""
    from services.rollout.__main__ import app as replica

    last_words.listen()
    replica(list(arguments), prog_name="python -m services.rollout")


if __name__ == "__main__":
    app()
