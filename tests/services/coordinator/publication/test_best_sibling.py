"""Which replica copies its weights to one that joins."""

from dataclasses import replace

import pytest

from millrace.ids import JobId, MemberId
from services.coordinator.publication.joining import best_sibling
from services.coordinator.state.member import Configured, Member, MemberKind, Pulse


def member(name: str, host: str, *, engine: str = "vllm", dtype: str = "bfloat16", running: int = 0) -> Member:
    found = Member(MemberId(name), MemberKind.ROLLOUT, "host:1", "", engine, "", 1, host, "cpu")
    found.configured = Configured(JobId("job"), dtype=dtype, world_size=1)
    found.pulse = replace(Pulse(), running=running)
    return found


LATE = member("late", "b")
BUSY_NEAR, FREE_FAR = member("near", "b", running=9), member("far", "a")
OTHER_ENGINE_NEAR = member("other", "b", engine="sglang")


@pytest.mark.parametrize(
    ("able", "chosen"),
    [
        ([FREE_FAR, BUSY_NEAR], "near"),
        ([OTHER_ENGINE_NEAR, FREE_FAR], "far"),
        ([FREE_FAR, member("free", "a"), member("busy", "c", running=3)], "far"),
        ([member("float", "b", dtype="float32"), FREE_FAR], "far"),
        ([member("float", "b", dtype="float32")], None),
        ([], None),
    ],
    ids=["own-host", "same-engine-first", "least-busy", "own-dtype", "no-dtype", "nobody"],
)
def test_the_best_sibling(able: list[Member], chosen: str | None) -> None:
    best = best_sibling(able, [LATE])
    assert (best.id if best else None) == chosen
