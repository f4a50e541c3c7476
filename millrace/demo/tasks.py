"""The demo's tasks by name."""

from millrace.demo.hunt import TreasureHunt
from millrace.demo.reverse import Reverse
from millrace.demo.task import Task
from millrace.errors import InvalidJob
from millrace.validation.names import choose

TASKS: dict[str, Task] = {"reverse": Reverse(), "hunt": TreasureHunt()}


def task_named(name: str) -> Task:
    """Raises InvalidJob."""
    if name not in TASKS:
        raise InvalidJob(f"--task: there is no task {name!r}.", choose(name, list(TASKS)))
    return TASKS[name]
