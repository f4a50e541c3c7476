"""The shape of a job's model: from its folder, or the published sizes where the folder is not on this machine."""

from pathlib import Path

from millrace.errors import refused
from millrace.megatron.architectures.published import PUBLISHED, published_as
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.shape import decoder_shape
from millrace.spec import JobSpec
from millrace.validation.names import choose

FIELD = "--model"


def model_shape(spec: JobSpec, name: str | None = None) -> ModelShape:
    """The shape of the job's model. `name`: a published model to take instead. Raises InvalidJob where the folder is
    not there and its name is that of no published model."""
    if name is not None:
        if name.lower() not in PUBLISHED:
            raise refused(FIELD, name, "is no model whose sizes are known", choose(name, PUBLISHED))
        return PUBLISHED[name.lower()]
    folder = Path(spec.model.path)
    if folder.is_dir():
        return decoder_shape(folder)
    known = published_as(folder.name)
    if known is None:
        fix = f"give a folder that this machine sees, or --model with one of {', '.join(PUBLISHED)}."
        raise refused("model.path", spec.model.path, "is not on this machine, and no model of this name is known", fix)
    return PUBLISHED[known]
