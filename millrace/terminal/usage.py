"""What a member uses, as `millrace fleet` and `millrace top` show it."""

from millrace.rest import MemberView

GB = 1e9
HEADINGS = (">CACHE", ">GPU", ">GPU GB", ">HOST GB")
"""Columns of `cells`."""


def cells(member: MemberView) -> tuple[str, str, str, str]:
    """Part of the engine's cache that is in use; mean part of the time in which its GPUs run kernels; memory in use on
    these GPUs, of what they have; memory of its processes and of all processes on its hosts, of what these have. `–`
    where a figure is not known."""
    cache = "–" if member.cache_used is None else f"{member.cache_used:.0%}"
    told = [gpu.busy for gpu in member.gpus if gpu.busy is not None]
    busy = f"{sum(told) / len(told):.0%}" if told else "–"
    gpus = _of([gpu.used_bytes for gpu in member.gpus], [gpu.size_bytes for gpu in member.gpus])
    own = sum(host.process_bytes for host in member.hosts)
    hosts = _of([host.used_bytes for host in member.hosts], [host.size_bytes for host in member.hosts])
    return cache, busy, gpus, f"{own / GB:.1f} in {hosts}" if member.hosts else "–"


def _of(used: list[int], sizes: list[int]) -> str:
    return f"{sum(used) / GB:.1f}/{sum(sizes) / GB:.0f}" if sizes else "–"
