"""Plans that know hosts: what a host has already is not fetched over the network, and hosts send about as much."""

from collections import Counter

import numpy as np
import pytest

from millrace.contracts.v1 import weights_pb2
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.layout import most_dims
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.plans.sharded import ShardedPlan, plan
from tests.layouts import whole_layout

MANIFEST = Manifest(tuple(TensorInfo(f"t{i}", (64, 64), "bfloat16") for i in range(32)))
WHOLE = whole_layout(MANIFEST).boxes
MESSAGE_BYTES = 1 << 15


def rows(part: int, parts: int, tensors: range = range(32)) -> Boxes:
    """One of `parts` equal parts of the tensors, cut by rows."""
    size = 64 // parts
    return Boxes.of(((i, (part * size, 0), (size, 64)) for i in tensors), most_dims(MANIFEST))


def crossing(made: ShardedPlan, hosts: list[str]) -> Counter[str]:
    """Bytes that leave each host for another one."""
    left: Counter[str] = Counter()
    for _, source, target, content in made.hops.tolist():
        if hosts[source] != hosts[target]:
            left[hosts[source]] += int(made.sizes[content])
    return left


def made(senders: list[Boxes], receivers: list[Boxes], hosts: list[str]) -> ShardedPlan:
    return plan(MANIFEST, senders, receivers, MESSAGE_BYTES, hosts)


def test_a_copy_on_the_receivers_host_is_preferred() -> None:
    """Two hosts, each with a whole copy in four shards, and two workers each: nothing has to cross."""
    senders, receivers = [rows(i, 4) for i in range(4)] * 2, [rows(i, 2) for i in range(2)] * 2
    hosts = ["a"] * 4 + ["b"] * 4 + ["a"] * 2 + ["b"] * 2
    blind = made(senders, receivers, [])
    assert sum(crossing(blind, hosts).values()) >= MANIFEST.bytes // 2
    assert not crossing(made(senders, receivers, hosts), hosts)


def test_hosts_send_equally_and_then_their_ranks() -> None:
    """Three copies on host a and one on b, for two receivers elsewhere: half of the bytes come from each host."""
    hosts = ["a"] * 3 + ["b", "c", "d"]
    blind, knowing = (made([WHOLE] * 4, [WHOLE] * 2, told) for told in ([], hosts))
    sent = crossing(blind, hosts)
    assert sent["a"] > 2.5 * sent["b"]
    sent = crossing(knowing, hosts)
    assert sum(sent.values()) == 2 * MANIFEST.bytes
    assert abs(sent["a"] - sent["b"]) < 0.05 * sent["b"]
    of_rank = knowing.egress()[:3]
    assert of_rank.max() - of_rank.min() < 0.1 * of_rank.mean()


def test_a_host_that_has_to_send_more_of_one_part_sends_less_of_others() -> None:
    """Host a alone holds the first quarter of the tensors; both hold the rest."""
    senders = [WHOLE, rows(0, 1, range(8, 32))]
    hosts = ["a", "b", "c"]
    blind, knowing = (made(senders, [WHOLE], told) for told in ([], hosts))
    assert crossing(blind, hosts)["a"] > 1.5 * crossing(blind, hosts)["b"]
    sent = crossing(knowing, hosts)
    assert abs(sent["a"] - sent["b"]) < 0.1 * sent["b"]


def test_replicas_of_one_host_fetch_a_content_once() -> None:
    """Four replicas of two workers on host c, as many senders on a and b: without hosts each would be sent its own."""
    senders, receivers = [WHOLE] * 8, [rows(i, 2) for i in range(2)] * 4
    hosts = ["a"] * 4 + ["b"] * 4 + ["c"] * 8
    blind, knowing = (made(senders, receivers, told) for told in ([], hosts))
    assert sum(crossing(blind, hosts).values()) == 4 * MANIFEST.bytes
    sent = crossing(knowing, hosts)
    assert sum(sent.values()) == MANIFEST.bytes and abs(sent["a"] - sent["b"]) < 0.05 * sent["b"]
    assert (knowing.ingress()[8:] == MANIFEST.bytes // 2).all()


@pytest.mark.parametrize("hosts", [[], ["a"] * 6, [""] * 6], ids=["not-told", "one-host", "unknown"])
def test_the_plan_within_one_host_is_that_without_hosts(hosts: list[str]) -> None:
    senders, receivers = [rows(i, 2) for i in range(2)] * 2, [WHOLE] * 2
    assert made(senders, receivers, hosts).hash == made(senders, receivers, []).hash


def test_hosts_travel_with_the_layouts_and_a_member_may_be_silent() -> None:
    told = wire_layouts.encode([WHOLE, WHOLE], ["a", "b"])
    joined = wire_layouts.joined([told, wire_layouts.encode([WHOLE])])
    assert wire_layouts.hosts_of(joined) == ["a", "b", ""]
    again = weights_pb2.Layouts.FromString(joined.SerializeToString())
    assert wire_layouts.hosts_of(again) == ["a", "b", ""]
    assert wire_layouts.hosts_of(wire_layouts.encode([WHOLE] * 2)) == ["", ""]


def test_the_planner_uses_the_hosts_of_the_layouts() -> None:
    hosts = ["a", "b", "b"]
    sides = weights_pb2.Sides(
        senders=wire_layouts.encode([WHOLE, WHOLE], hosts[:2]), receivers=wire_layouts.encode([WHOLE], hosts[2:])
    )
    planned = wire_layouts.Planner().plan(MANIFEST, sides)
    assert not crossing(planned, hosts) and np.array_equal(planned.egress(), [0, MANIFEST.bytes, 0])
