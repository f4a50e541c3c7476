"""The engines: one folder each, and one descriptor in `millrace/engines`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from millrace.descriptors import EngineDescriptor, imported
from millrace.engines import ENGINES, unknown_engine
from millrace.errors import InvalidState, NotFound
from millrace.software import Probe
from services.rollout.engine import Engine, ReplyEngine, ScoringEngine
from services.rollout.nodes.leader import Leader


def probe(name: str) -> Probe:
    """Whether the engine `name` would run here. Imports no engine. Raises NotFound for an unknown name."""
    return _descriptor(name).probe()


def create(name: str, nodes: Leader | None = None) -> Engine:
    """An engine that is not started yet. `nodes`: the other hosts on which it lies, for an engine that can. Raises
    NotFound for an unknown name."""
    implementation = imported(_descriptor(name).implementation)
    engine: Engine = implementation() if nodes is None else implementation(nodes)
    return engine


@contextlib.contextmanager
def import_errors(name: str) -> Iterator[None]:
    """Raises InvalidState with the fix if the engine `name` is installed and, as it starts, cannot be imported."""
    try:
        yield
    except ImportError as error:
        software = _descriptor(name).software
        what = f"--engine: {name}: {software.title} is installed and cannot be imported: {error}"
        raise InvalidState(what, f"install it again: {software.how_to_install(reinstall=True)}.") from error


def import_transformers() -> None:
    """Imports transformers before threads do: its lazy modules fail when two threads load them at the same time."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def create_scoring(name: str) -> ScoringEngine:
    """An engine that scores for a pool, and is not started yet. Raises NotFound for one that cannot."""
    engine: ScoringEngine = _of_pool(name, "score", lambda descriptor: descriptor.scoring)
    return engine


def create_replying(name: str) -> ReplyEngine:
    """An engine that replies for a pool, and is not started yet. Raises NotFound for one that cannot."""
    engine: ReplyEngine = _of_pool(name, "reply", lambda descriptor: descriptor.replies)
    return engine


def _of_pool(name: str, what: str, implementation: Callable[[EngineDescriptor], str]) -> Any:
    if not (found := implementation(_descriptor(name))):
        able = ", ".join(each for each, engine in ENGINES.items() if implementation(engine))
        raise NotFound(f"--engine: {name}: this engine does not {what} for pools.", f"choose one of {able}.")
    return imported(found)()


def _descriptor(name: str) -> EngineDescriptor:
    if name not in ENGINES:
        mistake = unknown_engine("--engine", name)
        raise NotFound(mistake.what, mistake.fix)
    return ENGINES[name]
