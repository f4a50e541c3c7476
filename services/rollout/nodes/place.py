"""Which node of a replica this process is, and how the nodes of a replica reach each other."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from millrace.engines import ENGINE_NAMES, ENGINES
from millrace.errors import InvalidState, wrong_value
from millrace.service_process import option
from millrace.wire.address import host_address, interface_of

LEADER_PORT = 7650
MOST_NODES = 1024
EngineOption = Annotated[str, option("MILLRACE_ENGINE", f"One of {', '.join(ENGINE_NAMES)}.")]
PortOption = Annotated[int, option("MILLRACE_PORT", "Port of the replica's gRPC server; 0: a free port.")]
NodesOption = Annotated[
    int, option("MILLRACE_NODES", "Number of hosts on which the replica's engine lies.", min=1, max=MOST_NODES)
]
NodeRankOption = Annotated[
    int,
    option("MILLRACE_NODE_RANK", "Number of this host among them; 0 is the replica.", min=0, max=MOST_NODES),
]
LeaderOption = Annotated[
    str, option("MILLRACE_LEADER", f"HOST[:PORT] of node 0's gRPC server; without a port: {LEADER_PORT}.")
]
NodeLostOption = Annotated[
    float,
    option(
        "MILLRACE_NODE_LOST_S",
        "Seconds of silence before the nodes count each other as lost. Node 0 decides for all.",
        min=1.0,
        max=600.0,
    ),
]
NODE_LOST_S = 10.0


@dataclass(frozen=True)
class Place:
    """One node's place in its replica."""

    rank: int
    """0 is the leader."""
    nodes: int
    host: str
    """Host and port are those of the leader's gRPC server."""
    port: int

    @classmethod
    def of(cls, engine: str, nodes: int, rank: int, leader: str) -> Self | None:
        """The place that the options of the command name; None for a replica on one host. Raises InvalidState if
        they do not fit together, or the engine lies on one host."""
        if nodes == 1:
            if rank or leader:
                option, value = ("--node-rank", rank) if rank else ("--leader", leader)
                raise _wrong(option, value, "the replica has one node", "give the number of hosts with --nodes.")
            return None
        if not ENGINES[engine].follower:
            several = ", ".join(name for name, each in ENGINES.items() if each.follower)
            reason = f"the engine {engine} lies on one host"
            raise _wrong("--nodes", nodes, reason, f"leave --nodes out, or use one of {several}.")
        if rank >= nodes:
            raise _wrong("--node-rank", rank, f"the nodes are numbered 0 to {nodes - 1}", "give each its own number.")
        host, _, port = leader.rpartition(":") if ":" in leader else (leader, "", str(LEADER_PORT))
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            fix = "give HOST or HOST:PORT of node 0, the same on all nodes."
            raise _wrong("--leader", leader, "is no address", fix)
        return cls(rank, nodes, host, int(port))

    def own_port(self, asked: int) -> int:
        """The port of this node's gRPC server; `asked` is that of --port, 0 for any. A follower has none. Raises
        InvalidState if the followers would look for the leader at another port."""
        if self.rank == 0 and asked not in (0, self.port):
            raise _wrong("--port", asked, f"--leader names port {self.port}", "leave --port out on node 0.")
        return self.port

    @property
    def address(self) -> str:
        """host:port of the leader."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class EngineStart:
    """What a node starts its share of the engine with. All but the rank is the same on all nodes."""

    rank: int
    nodes: int
    host: str
    """Host and port are those where the engine's ranks meet, on the leader."""
    port: int
    seed: int
    worker_rpc: str
    """Where the workers connect to the replica: see `worker_rpc.Endpoint`."""


def network_environment() -> Mapping[str, str]:
    """Environment variables by which engine libraries find the address and the interface at which this host's other
    nodes reach it. Raises InvalidState if MILLRACE_HOST is no name of this host."""
    try:
        address = socket.gethostbyname(host_address())
    except OSError as error:
        raise _wrong("--host", host_address(), f"has no address: {error}", "give this host's address.") from error
    variables = {"VLLM_HOST_IP": address, "SGLANG_HOST_IP": address}
    if interface := interface_of(address):
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def set_network_environment() -> None:
    """Sets the variables, before an engine library is imported. Variables that the user has set are kept."""
    for name, value in network_environment().items():
        os.environ.setdefault(name, value)


def _wrong(option: str, value: object, reason: str, fix: str) -> InvalidState:
    mistake = wrong_value(option, value, reason, fix)
    return InvalidState(mistake.what, mistake.fix)
