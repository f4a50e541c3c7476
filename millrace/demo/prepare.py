"""`python -m millrace.demo.prepare FOLDER`: the demo's model, data and job spec (FOLDER/job.json). Runs nothing.

For stacks that others started, as `docker compose run --rm trainer python3 -m millrace.demo.prepare /data/demo`.
"""

from pathlib import Path
from typing import Annotated

import typer

from millrace.demo.run import Run


def prepare(
    folder: Annotated[Path, typer.Argument(help="Where every service finds it at the same path.")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int, typer.Option(min=1)] = 60,
) -> None:
    """Makes the demo's model and data in FOLDER and writes the job that trains on them."""
    spec = Run(folder.resolve(), seed, steps).prepared()
    path = folder / "job.json"
    path.write_text(spec.model_dump_json(indent=2))
    print(f"submit it with: millrace submit {path}", flush=True)


if __name__ == "__main__":
    typer.run(prepare)
