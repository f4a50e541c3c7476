"""What of an FSDP2 job cannot run, told at submission. Torch-free."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.data.model_folder import FIELD, text_config
from millrace.errors import InvalidJob
from millrace.fsdp2 import architectures, rotary, sequence_parallel
from millrace.spec import JobSpec

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
    """The config of a folder's text part; empty where it cannot be read, which the check of the folder tells."""
    try:
        return text_config(Path(path), field)
    except InvalidJob:
        return {}
