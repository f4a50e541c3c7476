"""The page's script in Node, with just enough of a browser."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
from pydantic import BaseModel

from millrace.events import Event, EventKind, JobMoved
from millrace.rest import (
    FleetView,
    JobPage,
    JobState,
    JobSummary,
    LedgerView,
    MemberState,
    MemberView,
    Problem,
    SampleView,
    TurnView,
    WarningView,
)
from services.coordinator.rest.app import PAGE

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
(SCRIPT,) = re.findall(r"<script>(.*?)</script>", PAGE.read_text(), re.DOTALL)
CODE = re.sub(r'"[^"\n]*"', '""', SCRIPT)
"""The script without its plain strings."""

BROWSER = """
const kept = {}, later = setTimeout, said = [], found = {};
const part = () => ({style: {}, children: [], setAttribute() {}, append(...all) { this.children.push(...all); },
  prepend(each) { this.children.unshift(each); }, replaceChildren(...all) { this.children = all; },
  get childElementCount() { return this.children.length; }, get lastChild() { return {remove() {}}; }});
globalThis.document = {getElementById: id => found[id] ??= part(), createElement: part};
globalThis.location = {hash: "#job-1"};
globalThis.sessionStorage = {getItem: name => kept[name] ?? null, setItem: (name, value) => { kept[name] = value; }};
globalThis.setTimeout = (work, ms) => later(work, ms / 50);
globalThis.setInterval = (work, ms) => { later(function again() { work(); later(again, ms / 50); }, ms / 50); };
const job = {id: "job-1", name: "sums", state: "running", status: "running", warnings: [], step: 1, steps: 2};
const ledger = {trained: 0, generated: 0, leased: 0, queued: 0, dropped: 0, issued: 0, reasons: {}};
let asked = 0, events = [], fleet = {epoch: 1, trainers: [], replicas: []};
const data = {"/v1/jobs": () => ({jobs: [job], next: null, total: 1}),
  "/v1/fleet": () => fleet,
  "/v1/jobs/job-1/ledger": () => ledger};
const answer = (path, headers) => {
  if (!path.endsWith("/events")) return JSON.stringify((data[path] ?? (() => []))());
  const after = Number(headers["Last-Event-ID"] ?? 0);
  return events.slice(after).map((message, n) => `data: ${JSON.stringify(
    {id: String(after + n + 1), time_s: 1, message, kind: "job.state", data: {state: "running"}})}\n\n`).join("");
};
globalThis.fetch = async (path, {headers}) => {
  const allowed = token === null || headers.Authorization === "Bearer " + token;
  return new Response(allowed ? answer(path.split("?")[0], headers) : "{}", {status: allowed ? 200 : 401});
};
globalThis.prompt = () => { asked += 1; return given.shift() ?? null; };
const told = () => found.log.children.map(line => line.children[2].children[0]);
"""


def played(before: str, then: str) -> Any:
    """What `then` answers once the page has been open for a while."""
    after = f"(async () => {{ {then}; console.log(JSON.stringify(answered)); process.exit(0); }})();"
    program = f"{before}{BROWSER}(function () {{{SCRIPT}}})();{after}"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WAIT = "await new Promise(done => later(done, 600))"


@needs_node
@pytest.mark.parametrize(
    ("given", "asked", "told"), [(["right"], 1, ["began"]), (["wrong", "right"], 2, ["began"]), ([], 1, [])]
)
def test_a_token_is_asked_for_once(given: list[str], asked: int, told: list[str]) -> None:
    before = f"const token = 'right', given = {json.dumps(given)};"
    assert played(before, f"events = ['began']; {WAIT}; const answered = [asked, told()]") == [asked, told]


@needs_node
def test_a_job_that_is_resumed_is_followed_again() -> None:
    before = "const token = null, given = [];"
    then = f"job.state = 'failed'; events = ['failed']; {WAIT}; job.state = 'queued'; events.push('resumed'); {WAIT}"
    assert played(before, f"{then}; const answered = told()") == ["resumed", "failed"]


@needs_node
def test_members_that_have_left_are_not_counted() -> None:
    member = {"engine": "vllm", "device": "cpu", "address": "", "trouble": "", "silent_s": 0, "version": 1}
    members = [
        {**member, "id": f"rollout-{state}", "kind": "rollout", "state": state, "leases": 0, "tokens_per_s": 0}
        for state in ("serving", "draining", "left", "lost")
    ]
    fleet = {"epoch": 3, "trainers": [], "replicas": members}
    then = f"fleet = {json.dumps(fleet)}; {WAIT}; const answered = found.about.textContent"
    assert played("const token = null, given = [];", then) == "0 trainers, 2 replicas, epoch 3"


MODELS: dict[str, type[BaseModel]] = {
    "page": JobPage,
    "job": JobSummary,
    "fleet": FleetView,
    "member": MemberView,
    "ledger": LedgerView,
    "sample": SampleView,
    "turn": TurnView,
    "event": Event,
    "event.data": JobMoved,
    "problem": Problem,
    "warning": WarningView,
}
"""What the script's variables hold."""


@pytest.mark.parametrize("variable", MODELS)
def test_the_page_reads_only_fields_that_the_models_have(variable: str) -> None:
    model = MODELS[variable]
    read = set(re.findall(rf"\b{re.escape(variable)}\.(\w+)", CODE))
    assert read and read <= {*model.model_fields, *model.model_computed_fields}


def test_the_page_knows_every_state_and_only_kinds_of_events_that_exist() -> None:
    kinds = set(re.findall(r'"([a-z]+\.[a-z]+)"', SCRIPT))
    assert kinds and kinds <= set(EventKind)
    (actions,) = re.findall(r"const actions = \{(.*?)\};", SCRIPT, re.DOTALL)
    assert set(re.findall(r"(\w+): \[", actions)) == set(JobState)


COLOURS = {
    name: themes
    for name, *themes in re.findall(r"--(\w+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", PAGE.read_text())
}
"""The page's colours by name, each for the light and for the dark theme."""


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "soft", "water", "good", "bad", "warm"])
def test_text_is_readable_on_every_background(name: str, theme: int) -> None:
    for background in ("paper", "card", "wash"):
        found = sorted(luminance(COLOURS[each][theme]) for each in (name, background))
        assert (found[1] + 0.05) / (found[0] + 0.05) >= 4.5, background


def test_the_colours_of_the_ledger_are_no_background_of_a_state() -> None:
    """A job's state has its name as its class, and `queued` is also a part of the ledger."""
    (style,) = re.findall(r"<style>(.*?)</style>", PAGE.read_text(), re.DOTALL)
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", style)
    words = {*JobState, *MemberState, "pausing", "cancelling"}
    filled = [selector.strip() for selector, body in rules if "background" in body]
    assert not [each for each in filled for part in each.split(",") if part.strip().removeprefix(".") in words]
