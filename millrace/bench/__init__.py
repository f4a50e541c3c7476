"""`millrace bench`: measurements that need only torch, and CuPy on GPUs."""

import typer

from millrace.bench.planning import planning
from millrace.bench.publication import publication

app = typer.Typer(name="bench", help="Measure parts of the system on this machine.", no_args_is_help=True)
app.command("publication")(publication)
app.command("plan")(planning)
