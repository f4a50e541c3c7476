"""The file `trainer.json` of a checkpoint: what the checkpoint is of, and which files it consists of."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millrace.ids import JobId, Version

FILE = "trainer.json"
FORMAT = 2


@dataclass(frozen=True)
class Description:
    """The contents of `trainer.json`."""

    job_id: JobId
    version: Version
    updates: dict[str, int]
    """Number of optimizer updates of each model, by the prefix of the model's tensors."""
    kl_coefficient: float | None
    """The adapted coefficient; None in older checkpoints."""
    ranks: int
    """Number of ranks that wrote the checkpoint."""
    model_folder: str
    """Path of the job's model folder; empty in older checkpoints."""
    model: str
    """Hash of the manifest of the policy, hexadecimal: the checkpoint can be read into models with the same one."""
    files: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each file in `state/`, by name."""
    model_weights: str | None = None
    """Path of the checkpoint that the job's model was read from; None where that was the model folder."""
    adapter: dict[str, Any] | None = None
    """The settings of the adapter that was trained (`AdapterSettings`); None where all weights were."""

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        (folder / FILE).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Description | None":
        """The description in a checkpoint's folder; None where there is none of this format."""
        try:
            fields = json.loads((folder / FILE).read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            return None
        return cls(
            job_id=JobId(fields["job_id"]),
            version=Version(fields["version"]),
            updates=fields["updates"],
            kl_coefficient=fields.get("kl_coefficient"),
            ranks=fields["ranks"],
            model_folder=fields.get("model_folder", ""),
            model=fields["model"],
            model_weights=fields.get("model_weights"),
            adapter=fields.get("adapter"),
            files=fields["files"],
        )
