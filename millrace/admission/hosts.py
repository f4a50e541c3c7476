"""Whether the ranks of a job's trainer lie on several hosts in a way that slows it down needlessly. Needs no torch."""

from millrace.backends import BACKENDS
from millrace.descriptors import Hosts, imported
from millrace.errors import Mistake
from millrace.spec.job import JobSpec


def warnings(spec: JobSpec, ranks: int, ranks_per_host: int) -> list[Mistake]:
    """Fields of the job with a better value, where a trainer has so many ranks, and each host so many of them. The job
    runs as it is."""
    hosts = Hosts(ranks, ranks_per_host)
    descriptor = BACKENDS[spec.trainer.backend]
    if not hosts.several or not descriptor.across_hosts:
        return []
    return list(imported(descriptor.across_hosts)(spec, hosts))
