"""The ledger in words and tables, for people."""

from collections.abc import Iterator

from millrace.engines import ENGINES
from millrace.megatron.architectures.shape import ModelShape
from millrace.memory.ledger import Ledger, Part, Phase, Prediction, peak
from millrace.memory.prediction import ReplicaPrediction, predict
from millrace.memory.savings import savings, together
from millrace.spec import JobSpec

GIB, MIB = 1 << 30, 1 << 20
HEADROOM = 0.06
"""Share of a GPU's memory that CUDA, NCCL and the gaps between the allocator's blocks take."""
DOUBLINGS = 7
"""How often the number of GPUs is doubled to see whether a job fits more of them."""
SHOWN = 2
"""Settings that a message names."""

PARTS = {
    Part.WEIGHTS: "weights",
    Part.GRADIENTS: "gradients",
    Part.OPTIMIZER: "optimizer",
    Part.ADAPTER: "adapter",
    Part.REFERENCE: "reference policy",
    Part.CRITIC: "critic",
    Part.GATHERED: "layers gathered for the pass",
    Part.ACTIVATIONS: "activations",
    Part.LOGITS: "logits and the head's gradient",
    Part.STAGING: "buffers of the publication",
    Part.KV_CACHE: "keys and values",
}
PHASES = {
    Phase.LOAD: "loading",
    Phase.SCORING: "log-probabilities",
    Phase.UPDATE: "update",
    Phase.PUBLICATION: "publication",
}


def gib(size: float) -> str:
    """Bytes in GiB, `1.25 GiB`, or in MiB if they are few."""
    value = size / GIB
    if value < 0.1:
        return f"{size / MIB:.1f} MiB"
    return f"{value:.1f} GiB" if value >= 10 else f"{value:.2f} GiB"


def fits(total: float, gpu_bytes: float) -> bool:
    """Whether a peak of `total` bytes fits a GPU of `gpu_bytes`."""
    return total <= (1 - HEADROOM) * gpu_bytes


def by_part(ledger: Ledger) -> str:
    """The parts on the device, largest first: `activations 27.0 GiB, optimizer 12.1 GiB`."""
    return ", ".join(f"{PARTS[part]} {gib(size)}" for part, size in ledger.largest_first())


def trainer_lines(spec: JobSpec, shape: ModelShape, ranks: int, gpu_bytes: float) -> Iterator[str]:
    """What the fullest rank of the trainer needs, whether that fits, and which settings would make it fit."""
    prediction = predict(spec, shape, ranks)
    total = peak(prediction).total
    fitting, found = fits(total, gpu_bytes), savings(spec, shape, ranks)
    yield f"trainer, fullest of {ranks} GPU{'s' if ranks > 1 else ''}, at a full token budget:"
    yield from _table(prediction)
    verdict = "fits" if fitting else "does not fit"
    yield f"  {verdict}: {gib(total)} of {gib(gpu_bytes)}, of which {HEADROOM:.0%} are for CUDA and gaps"
    for saving in found:
        yield f"  {saving} saves {gib(saving.bytes)}" + ("" if fitting else _whether(saving.total, gpu_bytes))
    if not fitting and not any(fits(saving.total, gpu_bytes) for saving in found):
        chosen, left = together(spec, shape, ranks, (1 - HEADROOM) * gpu_bytes)
        if chosen:
            names = "; ".join(map(str, chosen))
            yield f"  together ({names}): {gib(left)}{_whether(left, gpu_bytes)}"
    if not fitting and (enough := _enough_ranks(spec, shape, ranks, gpu_bytes)):
        yield f"  without other settings it fits {enough} GPUs"


def _whether(total: float, gpu_bytes: float) -> str:
    return ", and fits then" if fits(total, gpu_bytes) else ", and does not fit then"


def _enough_ranks(spec: JobSpec, shape: ModelShape, ranks: int, gpu_bytes: float) -> int | None:
    """The number of GPUs, doubled until the job fits; None if it fits no number of them."""
    for count in (ranks << times for times in range(1, DOUBLINGS + 1)):
        if fits(peak(predict(spec, shape, count)).total, gpu_bytes):
            return count
    return None


def replica_lines(replica: ReplicaPrediction, gpu_bytes: float) -> Iterator[str]:
    """What a worker of a replica does with its GPU."""
    workers = f", one of {replica.workers} GPUs" if replica.workers > 1 else ""
    yield f"replica with {replica.engine}{workers}:"
    for part, size in replica.ledger.largest_first():
        tokens = f" ({replica.cached_tokens:,} tokens)" if part is Part.KV_CACHE else ""
        yield f"  {PARTS[part]:32}{gib(size):>12}{tokens}"
        if part is Part.KV_CACHE and replica.state_bytes:
            yield f"  {'  of these a running request':32}{gib(replica.state_bytes):>12} in recurrent layers"
    if host := sum(replica.ledger.host.values()):
        yield f"  {'in host memory':32}{gib(host):>12}"
    has_cache = replica.cached_tokens or not ENGINES[replica.engine].memory_option
    verdict = "fits" if replica.ledger.total <= gpu_bytes and has_cache else "does not fit"
    yield f"  {verdict}: {gib(replica.ledger.total)} of {gib(gpu_bytes)}"


def _table(prediction: Prediction) -> Iterator[str]:
    """A line for each part with its bytes in each phase, then the totals and what is in host memory."""
    yield f"  {'':32}" + "".join(f"{PHASES[phase]:>20}" for phase in prediction)
    for part in Part:
        sizes = [ledger.device.get(part, 0.0) for ledger in prediction.values()]
        if any(sizes):
            yield f"  {PARTS[part]:32}" + "".join(f"{gib(size) if size else '–':>20}" for size in sizes)
    yield f"  {'together':32}" + "".join(f"{gib(ledger.total):>20}" for ledger in prediction.values())
    host = [sum(ledger.host.values()) for ledger in prediction.values()]
    if any(host):
        yield f"  {'in host memory':32}" + "".join(f"{gib(size) if size else '–':>20}" for size in host)
