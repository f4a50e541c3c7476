"""What is told of a publication to many receivers."""

import random

from millrace.contracts.v1 import weights_pb2
from millrace.events import MEMBERS_LISTED
from millrace.weights.plans.manifest import Content
from services.coordinator.publication.report import PARTS, PublicationReport, slowest


def _reports(count: int) -> list[weights_pb2.MemberReport]:
    chance = random.Random(0)
    return [
        weights_pb2.MemberReport(member_id=f"rollout-{n}", **{part: chance.random() for part in PARTS})
        for n in range(count)
    ]


def test_of_many_receivers_the_event_lists_the_slowest_and_the_metrics_count_all() -> None:
    sender, receivers = weights_pb2.MemberReport(member_id="trainer-0", bytes=8), _reports(1000)
    ref = weights_pb2.PublicationRef(job_id="job-1", version=3, epoch=1, attempt=1)
    report = PublicationReport.of(ref, Content.MODEL, "trainer", [sender, *receivers], {"prepare": 0.1}, 1.0, 0)
    assert report.done.receivers == 1000 and report.metrics()["publication/replicas"] == 1000
    assert [m.member for m in report.done.members[:1]] == ["trainer-0"] and len(report.done.members) == MEMBERS_LISTED
    for part in PARTS:
        largest = max(getattr(each, part) for each in receivers)
        assert report.metrics()[f"publication/{part}"] == largest
        assert max(getattr(each, part) for each in report.done.members) == largest
    assert len(report.pauses) == 1000


def test_of_few_receivers_all_are_listed_in_order() -> None:
    receivers = _reports(MEMBERS_LISTED - 1)
    assert slowest(receivers, MEMBERS_LISTED - 1) == receivers


def test_idle_shares_are_those_of_receivers_that_had_a_version_before() -> None:
    ref = weights_pb2.PublicationRef(job_id="job-1", version=3, epoch=1, attempt=1)
    sender = weights_pb2.MemberReport(member_id="trainer-0")
    idle = [weights_pb2.MemberReport(member_id=f"rollout-{n}", idle_ratio=share) for n, share in enumerate((0.0, 0.5))]
    new = weights_pb2.MemberReport(member_id="rollout-2")
    report = PublicationReport.of(ref, Content.MODEL, "trainer", [sender, *idle, new], {}, 1.0, 0)
    assert report.metrics()["rollouter/idle_ratio"] == 0.25
    assert [m.idle_ratio for m in report.done.members] == [None, 0.0, 0.5, None]
    first = PublicationReport.of(ref, Content.MODEL, "trainer", [sender, new], {}, 1.0, 0)
    assert "rollouter/idle_ratio" not in first.metrics()
