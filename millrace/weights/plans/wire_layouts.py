"""The two sides of a sharded publication on the wire, and the plan that everybody works out from them."""

from collections.abc import Sequence

from millrace.errors import PublicationFailed
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.sharded import MESSAGE_BYTES, ShardedPlan, plan
from millrace.wire.v1 import weights_pb2


def encode(ranks: Sequence[Boxes]) -> weights_pb2.Layouts:
    """What each rank holds or wants, the same layout once."""
    number: dict[bytes, int] = {}
    layouts = weights_pb2.Layouts()
    for boxes in ranks:
        if boxes.hash not in number:
            number[boxes.hash] = len(number)
            layouts.distinct.append(boxes.encode())
        layouts.of_rank.append(number[boxes.hash])
    return layouts


def decode(layouts: weights_pb2.Layouts) -> list[Boxes]:
    """Raises PublicationFailed for what no `encode` wrote."""
    try:
        distinct = [Boxes.decode(data) for data in layouts.distinct]
        return [distinct[number] for number in layouts.of_rank]
    except (ValueError, IndexError) as error:
        raise PublicationFailed(f"the layouts cannot be read: {error}", "run the same release everywhere.") from error


def joined(many: Sequence[weights_pb2.Layouts]) -> weights_pb2.Layouts:
    """The ranks of all, one after another."""
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
    """Works plans out, the latest only once: it is the same from step to step until somebody joins or leaves."""

    def __init__(self) -> None:
        self._made: tuple[bytes, bytes, ShardedPlan] | None = None

    def plan(self, manifest: Manifest, sides: weights_pb2.Sides) -> ShardedPlan:
        """Raises PublicationFailed where the sides do not fit together."""
        told = sides.SerializeToString(deterministic=True)
        if self._made is None or self._made[:2] != (manifest.hash, told):
            made = plan(manifest, decode(sides.senders), decode(sides.receivers), sides.message_bytes or MESSAGE_BYTES)
            self._made = (manifest.hash, told, made)
        return self._made[2]
