"""Layouts of Megatron's ranks that cross hosts needlessly.

The tensor-parallel ranks of a model exchange activations in
every layer, and so do the ranks that share a sequence or the experts; pipeline stages and copies of the model exchange
little. Torch-free.
"""

from collections.abc import Iterator

from millrace.backends.megatron import MegatronOptions, parse
from millrace.descriptors import Hosts
from millrace.errors import Mistake, wrong_value
from millrace.spec import JobSpec

FIELD = "trainer.backend_options"


def warnings(spec: JobSpec, hosts: Hosts) -> Iterator[Mistake]:
    """Fields with a better value. A group that no host could hold is the user's choice, unless it is a tensor-parallel
    one: pipeline stages do the same over hosts."""
    options = parse(spec.trainer.backend_options)
    tensor = options.tensor_parallel
    if hosts.cross(tensor):
        within = hosts.largest_within(tensor)
        stages = options.pipeline_parallel * tensor // within
        fix = f"give {within}, and pipeline_parallel {stages}."
        yield _crosses("tensor_parallel", tensor, "sum activations", hosts, fix)
        return
    yield from _sharing(options, hosts)


def _sharing(options: MegatronOptions, hosts: Hosts) -> Iterator[Mistake]:
    """Groups whose ranks lie one tensor-parallel group apart each."""
    context, tensor = options.context_parallel, options.tensor_parallel
    if context <= hosts.ranks_per_host and hosts.cross(context, tensor):
        closer = _closer(context, tensor, hosts)
        stages = options.pipeline_parallel * tensor // max(1, closer)
        fix = f"give tensor_parallel {closer}, and pipeline_parallel {stages}." if closer else ""
        fix = fix or f"give {hosts.largest_within(context, tensor)}."
        yield _crosses("context_parallel", context, "exchange keys and values", hosts, fix)
    expert, expert_tensor = options.expert_parallel, options.expert_tensor_size
    if expert <= hosts.ranks_per_host and hosts.cross(expert, expert_tensor):
        closer = _closer(expert, expert_tensor, hosts)
        fix = f"give expert_tensor_parallel {closer}." if closer else ""
        fix = fix or f"give {hosts.largest_within(expert, expert_tensor)}."
        yield _crosses("expert_parallel", expert, "exchange tokens", hosts, fix)


def _closer(size: int, stride: int, hosts: Hosts) -> int:
    """The largest divisor of `stride` with which no group of `size` ranks lies on several hosts; 0 if none does."""
    return next((one for one in range(stride, 0, -1) if stride % one == 0 and not hosts.cross(size, one)), 0)


def _crosses(name: str, value: int, what: str, hosts: Hosts, fix: str) -> Mistake:
    reason = f"its ranks {what} in every layer, and lie on several hosts of {hosts.ranks_per_host} ranks"
    return wrong_value(f"{FIELD}.{name}", value, reason, fix)
