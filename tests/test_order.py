"""Rooms import in one direction. The folders and modules directly in `millrace/` and in each service have an order, and
inside every other folder no circle exists.

Imports are read from the sources, including those inside functions and under TYPE_CHECKING. Generated stubs are left
out.
"""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("millrace", "services")
ORDER = {
    "millrace": """
        __main__
        cli
        planner
        demo memory
        admission fsdp2 local
        data
        bench checkpoints
        megatron report terminal
        client hub lora shared_copies
        spec
        events service_process trackers
        backends engines environments rest
        descriptors rewards rl weights
        wire
        telemetry
        contracts sandbox validation
        simulation
        differences drops errors ids interrupt sequence_cost software imports towers
    """,
    "services.coordinator": """
        __main__ backup
        process
        standby
        rest
        webhooks
        jobs scaling
        servicers stages
        publication work
        fleet observe redis_server
        diagnosis store
        options state threads timeline
    """,
    "services.environments": """
        __main__
        runs server
        messages
    """,
    "services.rollout": """
        launch
        __main__
        process
        server
        replica trial
        work
        judges
        pools sessions
        dialects engines environments
        episode nodes
        member scoring
        engine user_process
        weights
    """,
    "services.trainer": """
        __main__ launch
        rank
        service
        backends publication step
        checkpoints memory
        algorithms options protocol ranks
    """,
}
"""By package its rooms, from the top down. A room imports only from lines below its own."""
Import = tuple[str, str]
"""The module that imports, and what it imports."""


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path.relative_to(ROOT)): path
    for top in TOPS
    for path in sorted((ROOT / top).rglob("*.py"))
    if path.parent.name != "v1"
}


def imported_by(source: str) -> Iterator[str]:
    """The modules of this repository that a source names in imports. `from a import b` may name the module `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                yield whole if whole in MODULES else str(node.module)


@functools.cache
def all_imports() -> list[Import]:
    """Every import of the packages in TOPS by a module of theirs. Not at import: each worker collects this file."""
    return [
        (module, used)
        for module, path in MODULES.items()
        for used in imported_by(path.read_text())
        if used.partition(".")[0] in TOPS
    ]


def room(module: str, package: str) -> str | None:
    """The folder or module directly in `package` in which `module` lies."""
    return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else None


def between_rooms(package: str, imports: Iterable[Import]) -> Iterator[tuple[str, str, Import]]:
    for module, used in imports:
        own, other = room(module, package), room(used, package)
        if own is not None and other is not None and own != other:
            yield own, other, (module, used)


def upward(package: str, imports: Iterable[Import]) -> list[Import]:
    """The imports of a room that is not below the importing one."""
    lines = [line.split() for line in ORDER[package].split("\n") if line.strip()]
    height = {name: -number for number, line in enumerate(lines) for name in line}
    return [each for own, other, each in between_rooms(package, imports) if height[other] >= height[own]]


def circle(package: str, imports: Iterable[Import]) -> set[str]:
    """Rooms of the package that import each other, directly or over others."""
    pairs = {(own, other) for own, other, _ in between_rooms(package, imports)}
    while True:
        inside = {own for own, _ in pairs} & {other for _, other in pairs}
        kept = {(own, other) for own, other in pairs if own in inside and other in inside}
        if kept == pairs:
            return inside
        pairs = kept


def across_services(imports: Iterable[Import]) -> list[Import]:
    """Imports of one service by another, or of a service by what all of them share."""

    def owner(module: str) -> str:
        return ".".join(module.split(".")[:2]) if module.startswith("services.") else "millrace"

    return [(module, used) for module, used in imports if owner(used) not in ("millrace", owner(module))]


PACKAGES = sorted({module.rpartition(".")[0] for module in MODULES if "." in module} - {"services"})


@pytest.mark.parametrize("package", ORDER)
def test_every_room_has_a_place_in_the_order(package: str) -> None:
    rooms = {found for module in MODULES if (found := room(module, package)) is not None}
    assert sorted(ORDER[package].split()) == sorted(rooms)


@pytest.mark.parametrize("package", ORDER)
def test_no_room_imports_one_that_is_not_below_it(package: str) -> None:
    assert upward(package, all_imports()) == []


def test_the_rooms_of_every_service_have_an_order() -> None:
    assert {
        package for package in PACKAGES if package.count(".") == 1 and package.startswith("services.")
    } <= ORDER.keys()


def test_no_rooms_import_each_other() -> None:
    found = {package: circle(package, all_imports()) for package in PACKAGES}
    assert {package: rooms for package, rooms in found.items() if rooms} == {}


def test_no_service_imports_another_one() -> None:
    assert across_services(all_imports()) == []


def test_a_planted_import_is_found_wherever_it_stands() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from millrace import admission
def late() -> None:
    import services.trainer.step.step
"""
    planted = [("millrace.spec.job", used) for used in imported_by(source) if used.partition(".")[0] in TOPS]
    assert planted == [("millrace.spec.job", "millrace.admission"), ("millrace.spec.job", "services.trainer.step.step")]
    assert upward("millrace", [*all_imports(), *planted]) == planted[:1]
    assert circle("millrace", [*all_imports(), *planted]) >= {"admission", "spec"}
    assert across_services([*all_imports(), *planted]) == planted[1:]


def test_two_rooms_of_one_line_do_not_import_each_other() -> None:
    planted = ("services.trainer.step.step", "services.trainer.publication.sharded")
    assert upward("services.trainer", [planted]) == [planted]
