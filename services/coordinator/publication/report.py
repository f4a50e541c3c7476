"""What one publication moved and how long everybody took."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from millrace.ids import Version
from millrace.wire.v1 import weights_pb2

FIELDS = (
    "bytes",
    "prepare_s",
    "gather_s",
    "wire_s",
    "verify_s",
    "apply_s",
    "pause_s",
    "loader_tensors",
    "loader_bytes",
    "staging_bytes",
    "mode",
)


@dataclass(frozen=True)
class Report:
    version: Version
    epoch: int
    attempt: int
    source: str
    """Who sent: "trainer", or "sibling" for a copy to replicas that joined."""
    failures: int
    """Attempts before this one."""
    seconds: float
    """Of the whole publication, failed attempts included."""
    phases: Mapping[str, float]
    members: Sequence[Mapping[str, Any]]
    """The sender's report first, then one of each receiver that serves the version now."""

    @classmethod
    def nobody(cls, version: Version) -> Self:
        """There was no replica to publish to."""
        return cls(version, 0, 0, "trainer", 0, 0.0, {}, ())

    @classmethod
    def of(
        cls,
        ref: weights_pb2.PublicationRef,
        source: str,
        reports: Sequence[weights_pb2.MemberReport],
        phases: Mapping[str, float],
        seconds: float,
        failures: int,
    ) -> Self:
        members = [_told(report) for report in reports]
        return cls(Version(ref.version), ref.epoch, ref.attempt, source, failures, seconds, dict(phases), members)

    @property
    def receivers(self) -> Sequence[Mapping[str, Any]]:
        return self.members[1:]

    @property
    def bytes(self) -> int:
        """Bytes of one copy of the weights."""
        return int(self.members[0]["bytes"]) if self.members else 0

    @property
    def pauses(self) -> list[float]:
        return [float(m["pause_s"]) for m in self.receivers]

    def metrics(self) -> dict[str, float]:
        """For the step's row. Seconds are those of the slowest member."""
        values = {"timing_s/update_weights": self.seconds, "publication/replicas": float(len(self.receivers))}
        values["publication/failures"] = float(self.failures)
        if self.receivers:
            values["publication/bytes"] = float(self.bytes)
            for name in ("gather_s", "wire_s", "verify_s", "apply_s", "pause_s", "loader_tensors", "staging_bytes"):
                values[f"publication/{name}"] = max(float(m[name]) for m in self.members)
        return values

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        longest = max(self.pauses, default=0.0)
        origin = f" from {self.members[0]['member']}" if self.source == "sibling" else ""
        return (
            f"version {self.version} reached {len(self.receivers)} replica(s){origin} in {self.seconds:.3f} s: "
            f"{self.bytes / 1e6:.1f} MB, longest pause {longest:.3f} s"
        )


def _told(report: weights_pb2.MemberReport) -> dict[str, Any]:
    figures = {name: getattr(report, name) for name in FIELDS}
    return {"member": report.member_id} | figures | {"loader_names": list(report.loader_names)}
