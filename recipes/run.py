"""`python -m recipes`: converts the data, checks the job, starts the local stack on this host's GPUs, and trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from millrace import hub
from millrace.admission import submission, thorough
from millrace.cli.settings import Settings, changes_of
from millrace.client import Client
from millrace.local.options import StackOptions, pythons
from millrace.local.stack import Stack
from millrace.rest import JobState
from millrace.spec import parse
from millrace.spec.document import merged
from millrace.terminal.watch import show_live
from recipes.catalogue import RECIPES, Recipe, recipe
from recipes.data_sets import DATA_SETS, converted, data_set
from recipes.expected import expected, table_row

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Folder for data, jobs, logs and checkpoints.")]
Train = Annotated[str | None, typer.Option(help="File to convert for training instead of the hub's.")]
Test = Annotated[str | None, typer.Option(help="File to convert for evaluation instead of the hub's.")]
Model = Annotated[str | None, typer.Option(help="Folder of the model, instead of its name on the hub.")]


@app.command("list")
def list_recipes() -> None:
    """The recipes with the memory of a trainer's GPU and the times that the formulas give, as README.md has them."""
    for each in RECIPES.values():
        print(table_row(each))


@app.command()
def convert(
    name: Annotated[str, typer.Argument(help=" or ".join(DATA_SETS))],
    folder: Folder,
    train: Train = None,
    test: Test = None,
) -> None:
    """Converts a data set to FOLDER/NAME/train.parquet and test.parquet, in verl's columns."""
    chosen = data_set(name)
    for source, file in ((train or chosen.train, "train.parquet"), (test or chosen.test, "test.parquet")):
        target = folder.resolve() / name / file
        print(f"{target}: {converted(source, chosen.rows, target)} rows of {source}", flush=True)


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="Of a recipe.")],
    folder: Folder,
    model: Model = None,
    train: Train = None,
    test: Test = None,
    settings: Settings = None,
) -> None:
    """Converts the data unless it is there, writes FOLDER/NAME.yaml, and checks it as `millrace validate` does."""
    path = prepared(recipe(name), folder.resolve(), model, train, test, changes_of(settings))
    print(f"submit it with: millrace submit {path} --watch", flush=True)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="Of a recipe.")],
    folder: Folder,
    model: Model = None,
    train: Train = None,
    test: Test = None,
    replicas: Annotated[int, typer.Option(help="Rollout replicas, one GPU each.", min=1)] = 1,
    ranks: Annotated[int | None, typer.Option(help="Trainer's GPUs; without it the recipe's.", min=1)] = None,
    engine: Annotated[str, typer.Option(help="As of millrace up.")] = "vllm",
    python: Annotated[
        list[str] | None, typer.Option(metavar="ENGINE=PATH", help="As of millrace up; as often as needed.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Does what `prepare` does, starts a local stack, and trains. Ends with status 0 if the job succeeded."""
    chosen = recipe(name)
    job = prepared(chosen, folder.resolve(), model, train, test, changes_of(settings))
    spec = parse(yaml.safe_load(job.read_text()))
    options = StackOptions(
        state=str(folder.resolve() / "stack"),
        replicas=replicas,
        ranks=ranks or chosen.gpus,
        engine=engine,
        pythons=pythons(python or []),
    )
    needs = expected(chosen)
    print(f"expected of a trainer's GPU: {needs.memory_gb:.0f} GB; logs: {options.folder / 'logs'}", flush=True)
    with Stack(options) as stack, Client(stack.url) as client:
        ended = show_live(client, client.submit(spec).id)
    raise typer.Exit(0 if ended.state is JobState.SUCCEEDED else 1)


def prepared(
    chosen: Recipe,
    folder: Path,
    model: str | None = None,
    train: str | None = None,
    test: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """The file of the job, checked with all that it names, with `changes` of its fields. Data that was converted
    before is kept, unless another source is given. Raises InvalidJob, BadRow, Unavailable."""
    source = data_set(chosen.data)
    files = ((train, source.train, chosen.train_file(folder)), (test, source.test, chosen.test_file(folder)))
    for given, published, target in files:
        if given is not None or not target.exists():
            print(f"{target}: {converted(given or published, source.rows, target)} rows", flush=True)
    tree: dict[str, Any] = merged(chosen.tree(folder, model), changes or {})
    here = hub.local(submission.check(tree), data=True)
    for note in thorough.look(here, lambda things, what, count: things):
        print(note, flush=True)
    path = folder / f"{chosen.name}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path
