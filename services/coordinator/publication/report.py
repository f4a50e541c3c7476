"""What one publication moved, and how long each member took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from millrace.events import MemberTransfer, PublicationDone, PublishedContent, Source
from millrace.ids import MemberId, Version
from millrace.weights.plans.manifest import Content
from millrace.wire.v1 import weights_pb2

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
    """The payload of its event."""

    @classmethod
    def without_receivers(cls, version: Version) -> Self:
        """The report where there was no replica to publish to."""
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
        return cls(
            PublicationDone(
                version=ref.version,
                epoch=ref.epoch,
                attempt=ref.attempt,
                content=CONTENTS[content],
                source=source,
                failures=failures,
                seconds=seconds,
                phases=dict(phases),
                members=[_member_transfer(report) for report in reports],
            )
        )

    def lasting(self, seconds: float) -> Self:
        """The same report of a publication that took so long altogether."""
        return replace(self, done=self.done.model_copy(update={"seconds": seconds}))

    @property
    def receivers(self) -> Sequence[MemberTransfer]:
        """The receivers that serve the version now."""
        return self.done.members[1:]

    @property
    def bytes(self) -> int:
        """Size of one copy of the weights."""
        return self.done.members[0].bytes if self.done.members else 0

    @property
    def pauses(self) -> list[float]:
        """Seconds for which each receiver paused generation."""
        return [m.pause_s for m in self.receivers]

    def metrics(self) -> dict[str, float]:
        """Step metrics. Seconds are those of the slowest member."""
        values = {"timing_s/update_weights": self.done.seconds, "publication/replicas": float(len(self.receivers))}
        values["publication/failures"] = float(self.done.failures)
        if self.receivers:
            members = self.done.members
            values["publication/bytes"] = float(self.bytes)
            values["publication/gather_s"] = max(m.gather_s for m in members)
            values["publication/wire_s"] = max(m.wire_s for m in members)
            values["publication/verify_s"] = max(m.verify_s for m in members)
            values["publication/apply_s"] = max(m.apply_s for m in members)
            values["publication/pause_s"] = max(m.pause_s for m in members)
            values["publication/loader_tensors"] = float(max(m.loader_tensors for m in members))
            values["publication/staging_bytes"] = float(max(m.staging_bytes for m in members))
        return values

    def to_json(self) -> dict[str, Any]:
        """The report as the store keeps it."""
        return self.done.model_dump(exclude={"kind"})

    def __str__(self) -> str:
        longest = max(self.pauses, default=0.0)
        origin = f" from {self.done.members[0].member}" if self.done.source == "sibling" else ""
        what = f"{WORDS[self.done.content]}version {self.done.version}"
        return (
            f"{what} reached {len(self.receivers)} replica(s){origin} in {self.done.seconds:.3f} s: "
            f"{self.bytes / 1e6:.1f} MB, longest pause {longest:.3f} s"
        )


def _member_transfer(report: weights_pb2.MemberReport) -> MemberTransfer:
    return MemberTransfer(
        member=MemberId(report.member_id),
        bytes=report.bytes,
        prepare_s=report.prepare_s,
        gather_s=report.gather_s,
        wire_s=report.wire_s,
        verify_s=report.verify_s,
        apply_s=report.apply_s,
        pause_s=report.pause_s,
        loader_tensors=report.loader_tensors,
        loader_bytes=report.loader_bytes,
        staging_bytes=report.staging_bytes,
        mode=report.mode,
        loader_names=list(report.loader_names),
    )
