"""The engines: one folder each, and one descriptor in `millrace/engines`."""

from millrace.descriptors import EngineDescriptor, imported
from millrace.engines import ENGINES, unknown_engine
from millrace.errors import NotFound
from millrace.software import Probe
from services.rollout.engine import Engine
from services.rollout.nodes.leader import Leader
from services.rollout.pools.engine import ScoringEngine


def probe(name: str) -> Probe:
    """Whether the engine `name` would run here. Imports no engine. Raises NotFound for an unknown name."""
    return _descriptor(name).probe()


def create(name: str, nodes: Leader | None = None) -> Engine:
    """An engine that is not started yet. `nodes`: the other hosts on which it lies, for an engine that can. Raises
    NotFound for an unknown name."""
    implementation = imported(_descriptor(name).implementation)
    engine: Engine = implementation() if nodes is None else implementation(nodes)
    return engine


def create_scoring(name: str) -> ScoringEngine:
    """An engine that scores for a pool, and is not started yet. Raises NotFound for one that cannot."""
    if not (scoring := _descriptor(name).scoring):
        able = ", ".join(each for each, engine in ENGINES.items() if engine.scoring)
        raise NotFound(f"--engine: {name}: this engine does not score for pools.", f"choose one of {able}.")
    engine: ScoringEngine = imported(scoring)()
    return engine


def _descriptor(name: str) -> EngineDescriptor:
    if name not in ENGINES:
        mistake = unknown_engine("--engine", name)
        raise NotFound(mistake.what, mistake.fix)
    return ENGINES[name]
