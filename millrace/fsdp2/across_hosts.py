"""Layouts of FSDP2's ranks that cross hosts needlessly.

The ranks of one sharded copy gather weights in every layer, and the ranks that share a micro-batch exchange
activations; copies of the model exchange gradients once an update, or once a micro-batch with `offload_parameters`.
Torch-free.
"""

from collections.abc import Iterator
from math import gcd

from millrace.backends.fsdp2 import parse
from millrace.descriptors import Hosts
from millrace.errors import Mistake, wrong_value
from millrace.spec import JobSpec

FIELD = "trainer.backend_options"


def warnings(spec: JobSpec, hosts: Hosts) -> Iterator[Mistake]:
    """Fields with a better value. A copy over several whole hosts is the user's choice if the field says so."""
    options = parse(spec.trainer.backend_options)
    shared, size = options.sequence_parallel_size, options.fsdp_size
    several = f"several hosts of {hosts.ranks_per_host} ranks"
    if hosts.cross(shared):
        reason = f"its ranks exchange activations in every layer, and lie on {several}"
        fix = f"give {hosts.largest_within(shared)}."
        yield wrong_value(f"{FIELD}.sequence_parallel_size", shared, reason, fix)
    if hosts.cross(size or hosts.ranks) and (size is None or size % hosts.ranks_per_host):
        better = hosts.largest_within(gcd(hosts.ranks, hosts.ranks_per_host))
        reason = f"weights are gathered in every layer over {several}"
        times = f"{(size or hosts.ranks) / better:g} times"
        fix = f"give {better} if a GPU has room for {times} the share of weights, gradients and optimizer."
        yield wrong_value(f"{FIELD}.fsdp_size", size, reason, fix)
