"""Rules that an FSDP2 job breaks, reported at submission, and exchanges that cross hosts needlessly, reported once the
trainer's hosts are known. Torch-free."""

from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any

from millrace.backends.fsdp2 import parse
from millrace.data.model_folder import FIELD, text_config
from millrace.descriptors import Hosts
from millrace.errors import InvalidJob, Mistake, wrong_value
from millrace.fsdp2 import architectures, rotary, sequence_parallel
from millrace.spec import JobSpec


def across_hosts(spec: JobSpec, hosts: Hosts) -> Iterator[Mistake]:
    """Fields with a better value. A copy over several whole hosts is the user's choice if the field says so."""
    options = parse(spec.trainer.backend_options)
    shared, size = options.sequence_parallel_size, options.fsdp_size
    several = f"several hosts of {hosts.ranks_per_host} ranks"
    if hosts.cross(shared):
        reason = f"its ranks exchange activations in every layer, and lie on {several}"
        fix = f"give {hosts.largest_within(shared)}."
        yield wrong_value("trainer.backend_options.sequence_parallel_size", shared, reason, fix)
    if hosts.cross(size or hosts.ranks) and (size is None or size % hosts.ranks_per_host):
        better = hosts.largest_within(gcd(hosts.ranks, hosts.ranks_per_host))
        reason = f"weights are gathered in every layer over {several}"
        times = f"{(size or hosts.ranks) / better:g} times"
        fix = f"give {better} if a GPU has room for {times} the share of weights, gradients and optimizer."
        yield wrong_value("trainer.backend_options.fsdp_size", size, reason, fix)


CRITIC = "algorithm.critic.path"


def check_submission(spec: JobSpec) -> None:
    """The checks that need no trainer. Raises InvalidJob with every rule that is broken."""
    broken = list(sequence_parallel.mistakes_of(spec))
    for field, path in _models(spec):
        config = _config(path, field)
        broken += architectures.mistakes_of(config, field, path)
        broken += rotary.mistakes_of(spec, config, field, path)
    if broken:
        raise InvalidJob.of(list(dict.fromkeys(broken)))


def _models(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """The folders of models that the backend trains, with the fields that name them."""
    yield FIELD, spec.model.path
    if (critic := spec.algorithm.critic) is not None and critic.path is not None:
        yield CRITIC, critic.path


def _config(path: str, field: str) -> dict[str, Any]:
    """The config of a folder's text part; empty if it cannot be read, which the check of the folder reports."""
    try:
        return text_config(Path(path), field)
    except InvalidJob:
        return {}
