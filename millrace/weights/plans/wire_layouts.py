"""Layouts as they are sent between members, and the plan that every member computes from them."""

from collections.abc import Sequence

import numpy as np

from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.hosts import UNKNOWN
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.sharded import MESSAGE_BYTES, ShardedPlan, plan

LARGEST_MESSAGE_BYTES = 1 << 40


def encode(ranks: Sequence[Boxes], hosts: Sequence[str] = ()) -> weights_pb2.Layouts:
    """The boxes that each rank holds or wants, and the name of its host; empty if that is not known. A layout that
    several ranks have is sent once."""
    number: dict[bytes, int] = {}
    layouts = weights_pb2.Layouts(host_of_rank=hosts)
    for boxes in ranks:
        if boxes.hash not in number:
            number[boxes.hash] = len(number)
            layouts.distinct.append(boxes.encode())
        layouts.of_rank.append(number[boxes.hash])
    return layouts


def hosts_of(layouts: weights_pb2.Layouts) -> list[str]:
    """The name of each rank's host; unknown for all ranks of a member that did not name the host of each."""
    ranks = len(layouts.of_rank)
    return [*layouts.host_of_rank] if len(layouts.host_of_rank) == ranks else [UNKNOWN] * ranks


def _checked(many: Sequence[Boxes], manifest: Manifest) -> Sequence[Boxes]:
    """The boxes of each rank, if they lie in tensors of the manifest. Raises PublicationFailed."""
    shapes = [tensor.shape for tensor in manifest.tensors]
    dims = max([*map(len, shapes), *(boxes.dims for boxes in many)], default=0)
    ends = np.array([(*shape, *[1] * (dims - len(shape))) for shape in shapes], np.int64).reshape(len(shapes), dims)
    for boxes in {id(each): each for each in many}.values():
        fits = bool(((boxes.tensor >= 0) & (boxes.tensor < len(shapes))).all())
        if fits and len(boxes):
            inside = (boxes.offset >= 0) & (boxes.extent >= 1)
            fits = bool((inside & (boxes.extent <= ends[boxes.tensor, : boxes.dims] - boxes.offset)).all())
        if not fits:
            raise PublicationFailed("a layout has boxes outside of the manifest's tensors.", "publish again.")
    return many


def decode(layouts: weights_pb2.Layouts) -> list[Boxes]:
    """The boxes of each rank. Raises PublicationFailed for what `encode` did not write."""
    try:
        distinct = [Boxes.decode(data) for data in layouts.distinct]
        return [distinct[number] for number in layouts.of_rank]
    except (ValueError, IndexError) as error:
        raise PublicationFailed(f"the layouts cannot be read: {error}", "run the same release everywhere.") from error


def joined(many: Sequence[weights_pb2.Layouts]) -> weights_pb2.Layouts:
    """The layouts of all ranks of `many`, in order."""
    number: dict[bytes, int] = {}
    layouts = weights_pb2.Layouts()
    for each in many:
        for data in each.distinct:
            if data not in number:
                number[data] = len(number)
                layouts.distinct.append(data)
        layouts.of_rank.extend(number[each.distinct[rank]] for rank in each.of_rank)
        layouts.host_of_rank.extend(hosts_of(each))
    return layouts


class Planner:
    """Computes plans, and keeps the latest: it stays the same from step to step until a member joins or leaves."""

    def __init__(self) -> None:
        self._latest: tuple[bytes, bytes, ShardedPlan] | None = None
        """The manifest's hash and the encoded layouts that it was computed from, and the plan."""

    def plan(self, manifest: Manifest, layouts: weights_pb2.Sides) -> ShardedPlan:
        """Raises PublicationFailed if a receiver wants something that no sender holds."""
        encoded = layouts.SerializeToString(deterministic=True)
        if self._latest is None or self._latest[:2] != (manifest.hash, encoded):
            message_bytes = min(layouts.message_bytes or MESSAGE_BYTES, LARGEST_MESSAGE_BYTES)
            senders, receivers = (_checked(decode(side), manifest) for side in (layouts.senders, layouts.receivers))
            if not senders or not receivers:
                raise PublicationFailed("the layouts name no sender, or no receiver.", "publish again.")
            hosts = [*hosts_of(layouts.senders), *hosts_of(layouts.receivers)]
            made = plan(manifest, senders, receivers, message_bytes, hosts)
            self._latest = (manifest.hash, encoded, made)
        return self._latest[2]
