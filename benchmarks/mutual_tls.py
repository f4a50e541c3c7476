"""What mutual TLS costs a job: the demo's job on two stacks of this machine, one with TLS, one without, in turn.

    python -m benchmarks.mutual_tls --repeats 3 --steps 20

Both stacks run all the time, so that each has the other's idle services beside it. Answers are short and calls are
many, which is the dear case. Figures are of the steps after the first two. Prints each run, medians and the ratios
of neighbouring runs as JSON.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.stacks import finished, stack_in
from millrace.client import Client
from millrace.demo.run import Run
from millrace.events import PublicationDone
from tests.certificates import Authority

JOB_S = 900.0
FIRST = 2
"""Steps that are not counted."""


@dataclass(frozen=True)
class Figures:
    """One run of the job."""

    tls: bool
    tokens_per_s: float
    """Tokens of prompts and answers over the seconds of the counted steps."""
    step_s: float
    """Median."""
    publication_s: float
    """Median."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each side")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--state", type=Path, default=Path("state/mutual-tls"))
    options = parser.parse_args()
    state = options.state.resolve()
    job = Run(state, steps=options.steps).prepared().model_dump(mode="json")
    job.pop("evaluation")
    files = Authority(state / "pki").member("member").variables()
    sides: list[tuple[bool, Mapping[str, str]]] = [(False, {}), (True, files)]
    figures: list[Figures] = []
    with contextlib.ExitStack() as held:
        clients = {}
        for tls, variables in sides:
            with _environment(variables):
                folder = state / time.strftime(f"%H%M%S-{tls}")
                stack = stack_in(folder, engine=options.engine, standby=False)
                _, clients[tls] = held.enter_context(stack)
                assert clients[tls].url.startswith("https:" if tls else "http:")
        for number in range(options.repeats):
            for tls, variables in sides if number % 2 == 0 else reversed(sides):
                with _environment(variables):
                    figures.append(_run(clients[tls], job, f"{state}/output-{number}-{tls}", tls))
                print(json.dumps(asdict(figures[-1])), flush=True)
    for name in ("tokens_per_s", "step_s", "publication_s"):
        plain, by_tls = ([getattr(each, name) for each in figures if each.tls is tls] for tls, _ in sides)
        # Neighbours on the machine come and go: each run is compared with the one next to it.
        ratios = [round(one / other, 3) for one, other in zip(by_tls, plain, strict=True)]
        print(json.dumps({"figure": name, "plaintext": median(plain), "TLS": median(by_tls), "ratios": ratios}))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _run(client: Client, job: dict[str, Any], output: str, tls: bool) -> Figures:
    view = finished(client, job | {"output": f"{output}-{time.time_ns()}"}, JOB_S)
    rows = [row.values for row in client.metrics(view.id) if row.step > FIRST]
    done = [event.data for event in client.events(view.id, follow=False) if isinstance(event.data, PublicationDone)]
    tokens = sum(row["perf/total_num_tokens"] for row in rows)
    seconds = [row["timing_s/step"] for row in rows]
    published = median(data.seconds for data in done if data.version > FIRST)
    return Figures(tls, round(tokens / sum(seconds), 1), round(median(seconds), 4), round(published, 4))


if __name__ == "__main__":
    main()
