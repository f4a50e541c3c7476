"""A member as REST shows it."""

from millrace.contracts.v1 import fleet_pb2
from services.coordinator.state.member import Member

REQUEST = fleet_pb2.RegisterRequest(member_id="rollout-1", kind=fleet_pb2.MEMBER_KIND_ROLLOUT, address="a:1")


def test_usage_of_a_heartbeat_is_shown_and_what_is_absent_is_null() -> None:
    member = Member.of(REQUEST)
    before = member.view(0)
    assert before.cache_used is None and not before.hosts and not before.gpus
    usage = fleet_pb2.MemberUsage(
        hosts=[fleet_pb2.HostUsage(host="a", process_bytes=3, used_bytes=5, size_bytes=8)],
        gpus=[
            fleet_pb2.GpuUsage(host="a", gpu="0", used_bytes=1, size_bytes=2, busy=0.0, power_w=300.5),
            fleet_pb2.GpuUsage(host="a", gpu="1", used_bytes=1, size_bytes=2, temperature_c=41.0),
        ],
        cache_used=0.0,
    )
    member.pulse = member.pulse.next(fleet_pb2.HeartbeatRequest(member_id="rollout-1", usage=usage))
    shown = member.view(0)
    assert shown.cache_used == 0.0
    assert [host.model_dump() for host in shown.hosts] == [
        {"host": "a", "process_bytes": 3, "used_bytes": 5, "size_bytes": 8}
    ]
    assert [(gpu.gpu, gpu.busy, gpu.power_w, gpu.temperature_c) for gpu in shown.gpus] == [
        ("0", 0.0, 300.5, None),
        ("1", None, None, 41.0),
    ]
