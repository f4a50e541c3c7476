"""How quickly the page shows a large store, and how quickly it answers, measured in headless Chromium.

    python -m benchmarks.page --steps 100000 --samples 1000000 --replicas 200 --jobs 1000

The coordinator and its Redis are real processes; the store itself writes the jobs. One job has all of the steps and
samples. The replicas register and send heartbeats, and do nothing else. Prints one JSON object a view: milliseconds
from the navigation until the view shows its data and is painted (`useful_ms`, the median and the slowest of
`--visits`), and the longest time from an input to the next paint (`interaction_ms`, by the browser's Event Timing API,
which tells multiples of 8 ms). Needs the extra `web-tests` and chromium.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stored_jobs import store_jobs
from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.ids import JobId, new_member_id
from millrace.rest import SampleView, StepMetrics
from millrace.wire.channel import PROTOCOL_VERSION, Peer
from services.coordinator.observe import series
from services.coordinator.observe.series import Point
from services.coordinator.redis_server import RedisServer
from services.coordinator.store import Store
from services.coordinator.store.records import Records
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.web.stage import Stage

METRICS = 100
"""Metrics of a step."""
AT_ONCE = 2000
BEAT_S = 5.0
OBSERVE = """
window.inputs = [];
new PerformanceObserver(list => inputs.push(...list.getEntries().map(entry => entry.duration)))
  .observe({type: "event", durationThreshold: 16, buffered: true});
window.useful = selector => new Promise(done => {
  const look = () => document.querySelector(selector)
    ? requestAnimationFrame(() => setTimeout(() => done(performance.now()))) : requestAnimationFrame(look);
  look();
});
"""


def row(step: int, began_s: float) -> StepMetrics:
    chance = random.Random(step)
    values = {f"critic/score/{name}": chance.random() for name in ("mean", "max", "min")}
    values |= {"perf/total_num_tokens": 1e5, "timing_s/step": 10 + chance.random(), "actor/grad_norm": chance.random()}
    values |= {f"rewards/part-{n}/mean": chance.random() for n in range(METRICS - len(values))}
    return StepMetrics(step=step, time_s=began_s + 10 * step, values=values)


async def fill_steps(records: Records, steps: int) -> None:
    """Rows and the points of curves, as a job of that many steps leaves them."""
    began_s = time.time() - 10 * steps
    for first in range(0, steps + 1, series.LEVELS[-1]):
        rows = [row(step, began_s) for step in range(first, min(first + series.LEVELS[-1], steps + 1))]
        await records.set_rows(*rows)
        own = [Point.of_row(each) for each in rows]
        for size in series.LEVELS:
            whole = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
            names = [series.name(size, first + at * size) for at in range(len(whole))]
            if whole:
                await records.set_series({n: Point.merged(p).to_json() for n, p in zip(names, whole, strict=True)})
                await records.add_metric_keys(rows[0].values)


async def fill_samples(records: Records, samples: int, steps: int) -> None:
    """Groups of eight short answers, in the order of their steps."""
    for first in range(0, samples, AT_ONCE):
        made = []
        for number in range(first, min(first + AT_ONCE, samples)):
            group = number // 8
            made.append(
                SampleView(
                    step=1 + number * steps // samples if steps else 0,
                    prompt_id=f"{group // 1000}-{group % 1000}",
                    purpose="train",
                    prompt=f"user: What is {group} + {number % 97}?",
                    answer=f"The sum of both numbers is {group + number % 97}. " * 3,
                    ground_truth=str(group),
                    reward=float(number % 3 == 0),
                    reward_failure=None,
                    stop_reason="end_of_turn",
                    tokens=40,
                    versions=[number % 7],
                    member=f"rollout-{group % 200}",
                    data_source="sums",
                )
            )
        await records.add_samples(made)


async def fill(url: str, spec: dict[str, Any], options: argparse.Namespace) -> JobId:
    """Stores all jobs; answers the large one's id. It is cancelled, as all others, so that nobody runs it."""
    store = Store(url)
    try:
        job_id = await store_jobs(store, spec, options.jobs, queued=0)
        records = store.records(job_id)
        await fill_steps(records, options.steps)
        await fill_samples(records, options.samples, options.steps)
        await store.jobs.update(job_id, step=options.steps, version=options.steps, reward=0.5)
        return job_id
    finally:
        await store.close()


@contextlib.contextmanager
def replicas(coordinator: CoordinatorProcess, count: int) -> Iterator[None]:
    """Members that only register and send heartbeats."""
    stop = threading.Event()

    async def beat() -> None:
        peer = Peer(coordinator.address)
        members = [new_member_id("rollout") for _ in range(count)]
        for number, member in enumerate(members):
            await peer.call(
                FleetRpc.Register,
                fleet_pb2.RegisterRequest(
                    member_id=member,
                    kind=fleet_pb2.MEMBER_KIND_ROLLOUT,
                    address=f"127.0.0.1:{20000 + number}",
                    protocol_version=PROTOCOL_VERSION,
                    engine="vllm",
                    world_size=8,
                    host=f"host-{number // 8}",
                    device="cuda",
                ),
            )
        while not stop.is_set():
            for number, member in enumerate(members):
                await peer.call(FleetRpc.Heartbeat, fleet_pb2.HeartbeatRequest(member_id=member, tokens=number))
            await asyncio.to_thread(stop.wait, BEAT_S)
        await peer.close()

    thread = threading.Thread(target=lambda: asyncio.run(beat()))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


Act = Callable[[Any], None]


def measure(browser: Any, url: str, path: str, selector: str, acts: Sequence[Act], visits: int) -> dict[str, Any]:
    """The figures of one view. `selector`: what is there as soon as the view shows its data. `acts`: inputs."""
    useful, inputs = [], []
    for _ in range(visits):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.add_init_script(OBSERVE)
        tab = context.new_page()
        tab.goto(f"{url}/#/{path}", wait_until="commit")
        useful.append(tab.evaluate(f"window.useful({json.dumps(selector)})"))
        for act in acts:
            act(tab)
            tab.wait_for_timeout(400)
        inputs += tab.evaluate("window.inputs")
        context.close()
    return {
        "view": path.split("/")[0] if len(path.split("/")) < 3 else path.split("/")[2],
        "useful_ms": [round(statistics.median(useful)), round(max(useful))],
        "interaction_ms": round(max(inputs, default=0.0)),
        "inputs": len(acts) * visits,
    }


def views(job_id: str) -> list[tuple[str, str, list[Act]]]:
    def scroll(selector: str) -> Act:
        return lambda tab: tab.evaluate(f"document.querySelector({json.dumps(selector)}).scrollTop = 4000")

    def fill_in(label: str, text: str) -> Act:
        return lambda tab: tab.get_by_label(label, exact=True).press_sequentially(text)

    def click(selector: str) -> Act:
        return lambda tab: tab.locator(selector).first.click()

    def zoom(tab: Any) -> None:
        place = tab.locator(".u-over").first.bounding_box()
        tab.mouse.move(place["x"] + 0.4 * place["width"], place["y"] + 40)
        tab.mouse.down()
        tab.mouse.move(place["x"] + 0.6 * place["width"], place["y"] + 40, steps=4)
        tab.mouse.up()

    charts = [click("text=log scale"), click("button:text-is('tokens')"), zoom, fill_in("Search metrics", "part-7")]
    groups: list[Act] = [click(".row.group:nth-child(3)"), scroll(".rows.groups"), fill_in("step", "5000")]
    jobs: list[Act] = [scroll(".rows.jobs"), fill_in("Search jobs", "job 77"), click(".row.job input")]
    return [
        ("jobs", ".row.job", jobs),
        (f"job/{job_id}/metrics", ".chart canvas", charts),
        (f"job/{job_id}/samples", ".row.group", groups),
        ("fleet", ".row.member", [scroll(".rows.members"), fill_in("Search members", "host-7")]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 100_000), ("samples", 1_000_000), ("replicas", 200), ("jobs", 1000), ("visits", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {"MILLRACE_KEEP_JOBS": "100000"}
        with running(folder / "state", "--lost-after-s", "60", environment=environment) as coordinator:
            stage = Stage(folder, coordinator)
            began = time.monotonic()
            job_id = asyncio.run(fill(RedisServer(folder / "state" / "redis").url, stage.spec("large", 1), options))
            print(json.dumps({"filled_s": round(time.monotonic() - began), "load": os.getloadavg()[0]}), flush=True)
            with replicas(coordinator, options.replicas), sync_playwright() as playwright:
                chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                for path, selector, acts in views(job_id):
                    found = measure(browser, stage.url, path, selector, acts, options.visits)
                    print(json.dumps(found | {"load": os.getloadavg()[0]}), flush=True)
                browser.close()
            stage.close()


if __name__ == "__main__":
    main()
