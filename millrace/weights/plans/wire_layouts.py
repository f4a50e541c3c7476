"""Layouts as they are sent between members, and the plan that every member computes from them."""

from collections.abc import Sequence

from millrace.errors import PublicationFailed
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.sharded import MESSAGE_BYTES, ShardedPlan, plan
from millrace.wire.v1 import weights_pb2


def encode(ranks: Sequence[Boxes]) -> weights_pb2.Layouts:
    """The boxes that each rank holds or wants; a layout that several ranks have is sent once."""
    number: dict[bytes, int] = {}
    layouts = weights_pb2.Layouts()
    for boxes in ranks:
        if boxes.hash not in number:
            number[boxes.hash] = len(number)
            layouts.distinct.append(boxes.encode())
        layouts.of_rank.append(number[boxes.hash])
    return layouts


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
    return layouts


class Planner:
    """Computes plans, and keeps the latest: it stays the same from step to step until a member joins or leaves."""

    def __init__(self) -> None:
        self._latest: tuple[bytes, bytes, ShardedPlan] | None = None
        """The manifest's hash and the encoded layouts that it was computed from, and the plan."""

    def plan(self, manifest: Manifest, layouts: weights_pb2.Sides) -> ShardedPlan:
        """Raises PublicationFailed where a receiver wants something that no sender holds."""
        encoded = layouts.SerializeToString(deterministic=True)
        if self._latest is None or self._latest[:2] != (manifest.hash, encoded):
            message_bytes = layouts.message_bytes or MESSAGE_BYTES
            made = plan(manifest, decode(layouts.senders), decode(layouts.receivers), message_bytes)
            self._latest = (manifest.hash, encoded, made)
        return self._latest[2]
