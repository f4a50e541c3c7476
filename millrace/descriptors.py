"""What is known of an engine or a training backend without importing it.

Each has one file, named as jobs name it, in `millrace/engines` or `millrace/backends`, with a constant DESCRIPTOR. The
registry of a folder is its files.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, TypeVar

from millrace.software import Probe, Software
from millrace.validation.fields import StrictModel

Options = TypeVar("Options", bound=StrictModel)
SAMPLING_FIELDS = "rollout.temperature, rollout.top_p, rollout.top_k and rollout.stop"
NO_DRAFT_WEIGHTS = "publications do not reach the weights of a draft model, which would stay random"
EXPERTS_MOVE = "experts would move or multiply after the replica learned where each of them lies"
"""What the reserved and unbuilt options of several engines have in common."""


@dataclass(frozen=True)
class EngineDescriptor:
    """An engine: what generates in a rollout replica."""

    software: Software
    implementation: str
    """`module:class` of the `services.rollout.engine.Engine`."""
    options_class: str
    """`module:class` of the engine's options, whose annotated fields are the names that `rollout.engine_options` may
    have. Its source is read; nothing is imported."""
    options_example: Mapping[str, Any]
    """Valid `rollout.engine_options`, as an error shows them."""
    option_bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The smallest and largest value of options that are sizes."""
    reserved_options: Mapping[str, str] = field(default_factory=dict)
    """Options of the engine that a job cannot set: the field of the job with the same effect, or empty if the
    replica itself sets the option."""
    unbuilt_options: Mapping[str, str] = field(default_factory=dict)
    """Options of the engine that replicas cannot run with yet, each with the reason. Pools of judges may use them."""
    unreserved_options: frozenset[str] = frozenset()
    """Options that another engine reserves and this one takes."""
    size_options: tuple[str, ...] = ()
    """Options whose product is the number of GPUs of one replica."""
    copies_option: str = ""
    """The one of them that says how many copies of all weights but the experts a replica holds; empty if it is always
    one."""
    position_options: frozenset[str] = frozenset()
    """Options that change how many positions the model has."""
    memory_option: str = ""
    """The option that says which share of a GPU the engine takes; empty if it takes what it needs."""
    memory_share: float = 1.0
    """The share that it takes without that option."""
    context_option: str = ""
    """The option that limits prompt and response together, tokens; empty if there is none."""
    preloaded: tuple[str, ...] = ()
    """Modules that a replica's launcher imports before it forks the replica. They must start neither a thread nor
    CUDA."""
    follower: str = ""
    """`module:class` of the `services.rollout.nodes.follower.EngineShare`, by which the engine's workers run on
    further hosts; empty if the engine lies on one host."""
    scoring: str = ""
    """`module:class` of the `services.rollout.engine.ScoringEngine`, by which the engine scores for a pool; empty
    if it cannot."""
    replies: str = ""
    """`module:class` of the `services.rollout.engine.ReplyEngine`, by which it replies for a pool; empty if it
    cannot."""
    takes_images: bool = False
    """Whether prompts may have images (`data.images`)."""
    other_problem: Callable[[], str] = field(default=lambda: "")
    """Why the installed engine cannot run, with the fix; empty if it can."""

    def probe(self) -> Probe:
        """Whether the engine would run here. Imports no engine."""
        found = self.software.probe()
        problem = self.other_problem() if found.ok else ""
        return Probe(False, found.release, problem) if problem else found

    def world_size(self, options: Mapping[str, Any]) -> int:
        """GPUs of one replica with these engine options."""
        return prod(int(options.get(name) or 1) for name in self.size_options)

    def copies(self, options: Mapping[str, Any]) -> int:
        """Copies of all weights but the experts in one replica with these engine options."""
        return int(options.get(self.copies_option) or 1)


@dataclass(frozen=True)
class BackendDescriptor(Generic[Options]):
    """A training backend."""

    software: Software
    build: str
    """`module:function`, called with the job spec and this rank's `torch.device`; returns a
    `services.trainer.protocol.backend.Backend`."""
    options: type[Options]
    """What `trainer.backend_options` may hold."""
    ranks_multiple: Callable[[Options], int] = field(default=lambda options: 1)
    """The number of ranks has to be a multiple of this."""
    needs_whole_batch: Callable[[Options], str] = field(default=lambda options: "")
    """Why with these options the micro-batches of a whole step are needed before the first of them can be trained, in
    words; empty if they are not."""
    check: str = ""
    """`module:function`, called with the job spec at submission; raises InvalidJob. Empty if the options alone say
    all. The module must import neither torch nor the backend."""
    model_check: str = ""
    """A module that is run with the job spec on its standard input, and prints as JSON what is wrong with the model for
    this backend: `millrace validate` runs it, if the backend's software is installed. Empty if `check` says
    all."""
    across_hosts: str = ""
    """`module:function`, called with the job spec and the `millrace.descriptors.Hosts` of the trainer; yields fields
    that make ranks of different hosts exchange more than need be. Empty if there are none. Without torch."""
    replays_experts: bool = False
    """Whether `algorithm.router_replay` can be used."""
    takes_images: bool = False
    """Whether `data.images` can be used."""
    trains_towers: bool = False
    """Whether `trainer.train_tower` can be used."""
    trains_adapters: bool = False
    """Whether `model.lora` can be used."""
    publishes_adapters: bool = False
    """Whether `model.lora.merge: false` can be used."""
    memory: str = ""
    """`module:function`, called with the job spec, the model's shape, the number of ranks and the tokens of a
    micro-batch; returns a `millrace.memory.ledger.Prediction`."""
    role_options: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """For `reference` and `critic` the options that it may have with a value of its own."""
    page: str = ""
    """The page of the documentation with its options; empty for a table in docs/job.md."""


def imported(reference: str) -> Any:
    """What `module:name` refers to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def read(package: str, path: Iterable[str]) -> dict[str, Any]:
    """The DESCRIPTOR of every file of a package, by the file's name."""
    names = sorted(module.name for module in pkgutil.iter_modules(path))
    return {name: imported(f"{package}.{name}:DESCRIPTOR") for name in names}


@dataclass(frozen=True)
class Hosts:
    """The hosts of a trainer, with equally many ranks each."""

    ranks: int
    ranks_per_host: int

    @property
    def several(self) -> bool:
        return self.ranks > self.ranks_per_host

    def cross(self, size: int, stride: int = 1) -> bool:
        """Whether a group of `size` ranks, each `stride` after the one before, lies on several hosts. Groups fill runs
        of `size` × `stride` ranks."""
        run, length = size * stride, (size - 1) * stride
        firsts = (start + place for start in range(0, self.ranks, run) for place in range(stride))
        return any(first // self.ranks_per_host != (first + length) // self.ranks_per_host for first in firsts)

    def largest_within(self, size: int, stride: int = 1) -> int:
        """The largest divisor of `size` with which no group lies on several hosts."""
        divisors = (one for one in range(size, 0, -1) if size % one == 0)
        return next(one for one in divisors if not self.cross(one, stride))
