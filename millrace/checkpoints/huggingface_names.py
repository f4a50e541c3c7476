"""Torch's distributed checkpoints (DCP) of a Hugging Face module: the names of its tensors, wrappers aside."""

from millrace.checkpoints.index import CheckpointIndex
from millrace.checkpoints.located import Located, Part

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch.compile, FSDP1 and activation checkpointing add anywhere."""
OUTER = ("module.", "app.", "state.")
"""Beginnings of names that a wrapped module or a program's own state dict adds."""
TWICE = "model.model."
"""Where the state dict of a language model is stored as `model`."""
OTHERS = ("optim", "lr_scheduler", "scheduler", "train_state", "dataloader", "rng")
"""Beginnings of keys that are not the model's."""


def located(index: CheckpointIndex) -> dict[str, Located]:
    """The tensors of the checkpoint by the names that they have in the module."""
    return {
        name: Located(stored.shape, stored.dtype, (_whole(key, stored.shape),))
        for name, key in names(index).items()
        if (stored := index.tensors[key])
    }


def names(index: CheckpointIndex) -> dict[str, str]:
    """Name in the module → key in the checkpoint."""
    found = {
        ".".join(part for part in key.split(".") if part not in WRAPPERS): key
        for key in index.tensors
        if not key.startswith(OTHERS)
    }
    while True:
        outer = next((start for start in OUTER if any(name.startswith(start) for name in found)), None)
        if outer is None and any(name.startswith(TWICE) for name in found):
            outer = "model."
        if outer is None:
            return found
        found = {name.removeprefix(outer): key for name, key in found.items() if name.startswith(outer)}


def _whole(key: str, shape: tuple[int, ...]) -> Part:
    zero = (0,) * len(shape)
    return Part(key, zero, shape, zero, tuple(range(len(shape))))
