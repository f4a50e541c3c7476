"""`millrace bench plan`: how long computing a plan takes, for layouts of any size. Nothing is sent."""

import time
from typing import Annotated

import numpy as np
import typer
from rich import print as show

from millrace.backends.megatron import MegatronOptions
from millrace.megatron.architectures.published import SHAPES, shape_of
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import TRANSFORMER_ENGINE, layout
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.layout import most_dims
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.sharded import ShardedPlan


def planning(
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "deepseek-v3",
    trainer: Annotated[str, typer.Option(help="as tp=8,pp=8,ep=32")] = "tp=1,pp=8,ep=32,first=7,last=6",
    ranks: Annotated[int, typer.Option(help="ranks of the trainer")] = 256,
    replica: Annotated[
        str, typer.Option(help="as tp=32 or ep=32: how one replica's workers split the model")
    ] = "ep=32",
    workers: Annotated[int, typer.Option(help="workers of one replica")] = 32,
    replicas: Annotated[int, typer.Option()] = 8,
    gpus_per_host: Annotated[
        int, typer.Option(min=0, help="GPUs of each host, of which the plan knows; 0: it knows of no hosts")
    ] = 0,
) -> None:
    """Measure how long the plan of a publication takes, from a trainer's layout to those of replicas."""
    from millrace.bench.layouts import manifest
    from millrace.weights.plans.sharded import plan

    model = shape_of(shape)
    published = manifest(model)
    senders = _boxes(model, published, trainer, ranks)
    receivers = _boxes(model, published, replica, workers) * replicas
    numbered = [("t", i) for i in range(ranks)] + [("r", i) for i in range(len(receivers))]
    hosts = [f"{side}{i // gpus_per_host}" for side, i in numbered] if gpus_per_host else []
    began, own_began = time.perf_counter(), time.process_time()
    made = plan(published, senders, receivers, hosts=hosts)
    planned, own_planned = time.perf_counter(), time.process_time()
    digest = made.hash.hex()[:12]
    hashed, own_hashed = time.perf_counter(), time.process_time()
    steps = [made.steps(rank) for rank in (0, ranks)]
    ended = time.perf_counter()
    sent, got = made.egress()[:ranks], made.ingress()[ranks:]
    show(
        f"{len(published.tensors)} tensors, {published.bytes / 1e9:.1f} GB, {len(made.pieces)} pieces, "
        f"{len(made.hops)} messages in {made.rounds} rounds, median {np.median(made.sizes) / 1e6:.1f} MB, plan {digest}"
    )
    show(
        f"plan {planned - began:.2f} s, hash {hashed - planned:.2f} s, two ranks' steps {ended - hashed:.3f} s "
        f"({len(steps[0])} and {len(steps[1])} rounds); CPU time of the plan {own_planned - own_began:.2f} s, "
        f"of the hash {own_hashed - own_planned:.2f} s"
    )
    show(
        f"a trainer rank sends {sent.mean() / 1e9:.1f} GB, at most {sent.max() / 1e9:.1f}; "
        f"a worker gets {got.mean() / 1e9:.1f} GB, at most {got.max() / 1e9:.1f}"
    )
    if hosts:
        _show_hosts(made, hosts)


def _boxes(model: ModelShape, published: Manifest, split: str, count: int) -> list[Boxes]:
    """The boxes of `published` that each of `count` ranks holds; `split` says how, as tp=8,pp=8."""
    from millrace.bench.layouts import OPTIONS, numbers

    number = {tensor.name: i for i, tensor in enumerate(published.tensors)}
    options = MegatronOptions.model_validate({OPTIONS[name]: n for name, n in numbers(split).items()})
    topology = Topology(count, options)
    return [
        Boxes.of(
            (
                (number[piece.tensor.name], piece.source, piece.extent)
                for chunk in layout(model, topology, rank, TRANSFORMER_ENGINE)
                for placement in chunk.values()
                for piece in placement.pieces
            ),
            most_dims(published),
        )
        for rank in range(count)
    ]


def _show_hosts(made: ShardedPlan, hosts: list[str]) -> None:
    """Prints the bytes that the trainer's hosts send to others."""
    names, number = np.unique(hosts, return_inverse=True)
    source, target = number[made.hops[:, 1]], number[made.hops[:, 2]]
    crossing = made.sizes[made.hops[:, 3]] * (source != target)
    sent = np.bincount(source, weights=crossing, minlength=len(names))[np.unique(number[: made.senders])]
    show(
        f"{crossing.sum() / 1e9:.1f} GB go from host to host; a trainer host sends {sent.mean() / 1e9:.1f} GB, "
        f"at least {sent.min() / 1e9:.1f}, at most {sent.max() / 1e9:.1f}"
    )
