"""What a member uses of its hosts, from its heartbeat to REST."""

from millrace.contracts.v1 import fleet_pb2
from millrace.rest import GpuView, HostView


def host_views(usage: fleet_pb2.MemberUsage) -> list[HostView]:
    return [
        HostView(host=one.host, process_bytes=one.process_bytes, used_bytes=one.used_bytes, size_bytes=one.size_bytes)
        for one in usage.hosts
    ]


def gpu_views(usage: fleet_pb2.MemberUsage) -> list[GpuView]:
    return [
        GpuView(
            host=one.host,
            gpu=one.gpu,
            used_bytes=one.used_bytes,
            size_bytes=one.size_bytes,
            busy=optional(one, "busy"),
            power_w=optional(one, "power_w"),
            temperature_c=optional(one, "temperature_c"),
        )
        for one in usage.gpus
    ]


def optional(message: fleet_pb2.MemberUsage | fleet_pb2.GpuUsage, name: str) -> float | None:
    """The value of an optional number of a message; None where it is absent."""
    return float(getattr(message, name)) if message.HasField(name) else None
