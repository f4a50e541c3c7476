"""What one publication moved, and how long each member took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from millrace.contracts.v1 import weights_pb2
from millrace.events import MEMBERS_LISTED, MemberTransfer, PublicationDone, PublishedContent, Source
from millrace.ids import MemberId, Version
from millrace.weights.plans.manifest import Content
from millrace.wire.enums import fields_of

PARTS = ("gather_s", "code_s", "wire_s", "verify_s", "apply_s", "pause_s")
"""The seconds of a member of which the slowest counts."""
CONTENTS: Mapping[Content, PublishedContent] = {
    Content.MODEL: "model",
    Content.BASE: "base",
    Content.ADAPTER: "adapter",
}
WORDS: Mapping[PublishedContent, str] = {
    "model": "",
    "base": "the model without its adapter for ",
    "adapter": "the adapter of ",
}


@dataclass(frozen=True)
class PublicationReport:
    """A publication that is over."""

    done: PublicationDone
    """The payload of its event. It lists some of the members."""
    reports: Sequence[weights_pb2.MemberReport] = ()
    """What every member reported, the sender first."""

    @classmethod
    def without_receivers(cls, version: Version) -> Self:
        """The report if there was no replica to publish to."""
        return cls(
            PublicationDone(
                version=version, epoch=0, attempt=0, source="trainer", failures=0, seconds=0.0, phases={}, members=[]
            )
        )

    @classmethod
    def of(
        cls,
        ref: weights_pb2.PublicationRef,
        content: Content,
        source: Source,
        reports: Sequence[weights_pb2.MemberReport],
        phases: Mapping[str, float],
        seconds: float,
        failures: int,
    ) -> Self:
        """`reports`: the sender's first. `phases`: seconds by phase of the last attempt. `seconds`: duration of the
        whole publication with its `failures` failed attempts."""
        done = PublicationDone(
            version=ref.version,
            epoch=ref.epoch,
            attempt=ref.attempt,
            content=CONTENTS[content],
            source=source,
            failures=failures,
            seconds=seconds,
            phases=dict(phases),
            receivers=len(reports) - 1,
            members=[
                MemberTransfer(member=MemberId(report.member_id), **fields_of(report))
                for report in (reports[0], *slowest(reports[1:], MEMBERS_LISTED - 1))
            ],
        )
        return cls(done, reports)

    def lasting(self, seconds: float) -> Self:
        """The same report of a publication that took so long altogether."""
        return replace(self, done=self.done.model_copy(update={"seconds": seconds}))

    @property
    def bytes(self) -> int:
        """Size of one copy of the weights."""
        return self.reports[0].bytes if self.reports else 0

    @property
    def pauses(self) -> list[float]:
        """Seconds for which each receiver paused generation."""
        return [report.pause_s for report in self.reports[1:]]

    def metrics(self) -> dict[str, float]:
        """Step metrics. Seconds are those of the slowest member."""
        values = {"timing_s/update_weights": self.done.seconds, "publication/replicas": float(self.done.receivers)}
        values["publication/failures"] = float(self.done.failures)
        if self.done.receivers:
            values["publication/bytes"] = float(self.bytes)
            values |= {f"publication/{part}": max(getattr(r, part) for r in self.reports) for part in PARTS}
            values["publication/loader_tensors"] = float(max(r.loader_tensors for r in self.reports))
            values["publication/sent_bytes"] = float(self.reports[0].sent_bytes)
            values["publication/changed"] = self.reports[0].changed
            values["publication/snapshot_bytes"] = float(self.reports[0].snapshot_bytes)
            values["publication/staging_bytes"] = float(max(r.staging_bytes for r in self.reports))
        if idle := [report.idle_ratio for report in self.reports[1:] if report.HasField("idle_ratio")]:
            values |= {"rollouter/idle_ratio": sum(idle) / len(idle)}
        return values

    def to_json(self) -> dict[str, Any]:
        """The report as the store keeps it."""
        return self.done.model_dump(exclude={"kind"})

    def __str__(self) -> str:
        longest = max(self.pauses, default=0.0)
        origin = f" from {self.done.members[0].member}" if self.done.source == "sibling" else ""
        what = f"{WORDS[self.done.content]}version {self.done.version}"
        return (
            f"{what} reached {self.done.receivers} replica(s){origin} in {self.done.seconds:.3f} s: "
            f"{self.bytes / 1e6:.1f} MB, longest pause {longest:.3f} s"
        )


def slowest(reports: Sequence[weights_pb2.MemberReport], most: int) -> Sequence[weights_pb2.MemberReport]:
    """All reports, or of more than `most` those of the members that took longest. The slowest member of each part is
    always among them, so that the maxima of the chosen are those of all."""
    if len(reports) <= most:
        return reports
    seconds = [[getattr(report, part) for report in reports] for part in PARTS]
    of_parts = dict.fromkeys(part.index(max(part)) for part in seconds)
    totals = [sum(of_member) for of_member in zip(*seconds, strict=True)]
    by_seconds = sorted(range(len(reports)), key=lambda n: -totals[n])
    chosen = [*of_parts, *(n for n in by_seconds if n not in of_parts)][:most]
    return [reports[n] for n in sorted(chosen)]
