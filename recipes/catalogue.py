"""The recipes, and the job of each for given folders."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from millrace.errors import InvalidJob

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """One job spec of this folder, and what is not in it."""

    name: str
    """Of the job, and of the file without its ending."""
    shape: str
    """Sizes of the model: a name of `millrace.megatron.architectures.published`."""
    data: str
    """A name of `recipes.data_sets`."""
    gpus: int
    """GPUs of the trainer, one a rank."""

    @property
    def file(self) -> Path:
        return HERE / f"{self.name}.yaml"

    def tree(self, folder: Path | None = None, model: str | None = None) -> dict[str, Any]:
        """The job as the file has it; with its data and its output in `folder` instead of /data, and with another
        `model`, a path or a name on the hub."""
        tree: dict[str, Any] = yaml.safe_load(self.file.read_text())
        if folder is not None:
            tree["output"] = str(folder / "runs" / self.name)
            tree["data"]["files"] = [str(self.train_file(folder))]
            tree["evaluation"]["files"] = [str(self.test_file(folder))]
        if model is not None:
            tree["model"]["path"] = model
        return tree

    def train_file(self, folder: Path) -> Path:
        return folder / self.data / "train.parquet"

    def test_file(self, folder: Path) -> Path:
        return folder / self.data / "test.parquet"


MODELS = (("qwen3-0.6b", "gsm8k", 1), ("qwen3-1.7b", "gsm8k", 2), ("qwen3-8b", "dapo-math", 8))
RECIPES = {
    f"{shape}-{backend}": Recipe(f"{shape}-{backend}", shape, data, gpus)
    for shape, data, gpus in MODELS
    for backend in ("fsdp2", "megatron")
}
WITH_IMAGES = Recipe("qwen2.5-vl-7b-lora-fsdp2", "qwen2.5-vl-7b", "geometry3k", 2)
RECIPES[WITH_IMAGES.name] = WITH_IMAGES


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise InvalidJob(f"there is no recipe {name!r}.", f"choose one of {', '.join(RECIPES)}.")
    return RECIPES[name]
