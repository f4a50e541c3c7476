"""The form of the checkpoints that `millrace export` writes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.backends.megatron import MegatronOptions
from millrace.checkpoints.index import Part
from millrace.checkpoints.megatron_names import EXPERTS, LAYERS, PADDED, SAME
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import LOCAL, layout


@dataclass(frozen=True)
class Target:
    """Where a box of a tensor of the model is written."""

    part: Part
    shape: tuple[int, ...]
    """Shape of the whole stored tensor."""
    aliases: tuple[str, ...] = ()
    """Other keys under which the same values are stored."""


Form = Mapping[str, Sequence[Target]]
"""Name of a tensor of the model folder → where its boxes are written."""


def megatron_form(shape: ModelShape) -> Form:
    """A dist-checkpoint as Megatron-Core loads it where it is given no metadata: experts are stacked in one tensor, and
    so are the layers of a model whose layers are alike. Norms have Transformer Engine's names and those of Megatron's
    own layers. The vocabulary is not padded."""
    stacked = shape.experts is None or all(shape.experts.layers)
    found: dict[str, list[Target]] = defaultdict(list)
    (parameters,) = layout(shape, Topology(1, MegatronOptions()), 0, LOCAL)
    for parameter, placement in parameters.items():
        keys, leading = _keys(parameter, shape, stacked)
        for piece in placement.pieces:
            behind = piece.extent if parameter in PADDED else placement.shape
            stored = (*(at for at, _ in leading), *piece.target)
            along = (*(None for _ in leading), *range(len(piece.extent)))
            part = Part(keys[0], piece.source, piece.extent, stored, along)
            found[piece.tensor.name].append(Target(part, (*(n for _, n in leading), *behind), tuple(keys[1:])))
    return found


def module_states(form: Form) -> list[str]:
    """Keys of the states that Megatron-Core has besides the parameters of a module (`_extra_state`), one for each layer
    and expert: a model asks for them when it is loaded. They are empty unless the module computes in FP8."""
    found: dict[str, None] = {}
    for part, shape, aliases in ((t.part, t.shape, t.aliases) for targets in form.values() for t in targets):
        stacked = [dim for dim, along in enumerate(part.along) if along is None]
        offset = ".".join(str(part.stored[dim]) for dim in stacked) or "0"
        size = ".".join(str(shape[dim]) for dim in stacked) or "1"
        for key in (part.key, *aliases):
            module = key.rpartition(".")[0]
            modules = [module, module.replace("linear_proj", "core_attention")]
            found |= {f"{each}._extra_state/shard_{offset}_{size}": None for each in modules}
    return list(found)


def _keys(parameter: str, shape: ModelShape, stacked: bool) -> tuple[list[str], list[tuple[int, int]]]:
    """The keys of a parameter, and its index in each dimension along which parameters are stacked, with its size."""
    if not parameter.startswith(LAYERS):
        return [parameter], []
    number, _, rest = parameter.removeprefix(LAYERS).partition(".")
    before, leading = (LAYERS, [(int(number), shape.layers)]) if stacked else (f"{LAYERS}{number}.", [])
    if rest.startswith(EXPERTS) and shape.experts is not None:
        expert, _, linear = rest.removeprefix(EXPERTS).partition(".")
        return [f"{before}mlp.experts.experts.{linear}"], [*leading, (int(expert), shape.experts.count)]
    return [before + name for name in (rest, SAME.get(rest)) if name is not None], leading
