"""Megatron-Core's dist-checkpoints: each tensor of the model folder as boxes of the tensors that Megatron stores.

Megatron stores a parameter whole, whatever the number of ranks that held it. Its layers may be stacked in one tensor or
be stored by themselves, and so may the experts of a layer; gate and up projections may be one tensor or two. The names
are those of Transformer Engine's layers or of Megatron's own. All of this is found in the index itself.
"""

from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass

from millrace.backends.megatron import MegatronOptions
from millrace.checkpoints.index import CheckpointIndex, Located, Part, StoredTensor
from millrace.errors import refused
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.placement import Piece, Placement
from millrace.megatron.topology import Topology
from millrace.megatron.weights import LOCAL, layout

EMBEDDING = "embedding.word_embeddings.weight"
PADDED = (EMBEDDING, "output_layer.weight")
"""Parameters whose first dimension, the vocabulary, Megatron pads by a rule of each program."""
MODEL = ("embedding.", "decoder.", "output_layer.")
"""Beginnings of the parameters of a language model, behind the prefix of all keys."""
EXTRA = "_extra_state"
"""Part of the keys of Transformer Engine's own state, which is not read."""
LAYERS = "decoder.layers."
EXPERTS = "mlp.experts.local_experts."
HALVES = ("_w", "_v")
"""Endings of gate and up projections that are stored by themselves."""
SAME = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Norms of Megatron's own layers, and what they are called if they belong to the linear layer after them."""
Leading = tuple[tuple[int, int], ...]
"""Index and size of each dimension along which parameters are stacked: layers, experts."""


@dataclass(frozen=True)
class _Place:
    """Where a piece of a parameter is."""

    tensor: StoredTensor
    leading: Leading
    target: tuple[int, ...]
    """First index of the piece behind the leading dimensions."""
    shape: tuple[int, ...]
    """What the config says of these dimensions."""


def located(index: CheckpointIndex, shape: ModelShape) -> dict[str, Located]:
    """The tensors of the model folder that the checkpoint has. Raises InvalidJob if one has another shape than the
    config says."""
    prefix = _prefix(index)
    parts: dict[str, list[Part]] = defaultdict(list)
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    (parameters,) = layout(shape, Topology(1, MegatronOptions()), 0, LOCAL)
    for parameter, placement in parameters.items():
        for piece, place in _places(index, shape, prefix, parameter, placement):
            _check_shape(index, place, padded=parameter in PADDED)
            leading = tuple(at for at, _ in place.leading)
            along = (*(None for _ in leading), *range(len(piece.extent)))
            name, stored = piece.tensor.name, (*leading, *place.target)
            parts[name].append(Part(place.tensor.key, piece.source, piece.extent, stored, along))
            known[name] = (piece.tensor.shape, place.tensor.dtype)
    _check_unread(index, prefix, {part.key for found in parts.values() for part in found})
    return {name: Located(*known[name], tuple(found)) for name, found in parts.items()}


def _check_unread(index: CheckpointIndex, prefix: str, taken: Set[str]) -> None:
    """Raises InvalidJob if the checkpoint has tensors of the decoder that the model of the config does not take."""
    ours, twice = tuple(prefix + start for start in MODEL), (*SAME, *SAME.values())  # a norm may have both its names
    unread = (key for key in index.tensors if key.startswith(ours) and key not in taken and EXTRA not in key)
    left = sorted(key for key in unread if not key.endswith(twice))
    if left:
        reason = f"stores {', '.join(left[:3])}, for which the model of the config has no place"
        raise refused(index.field, str(index.folder), reason, "give the config.json of the model in this checkpoint.")


def _prefix(index: CheckpointIndex) -> str:
    """What all keys of the model begin with. Raises InvalidJob if there is no model."""
    ends = [key.removesuffix(EMBEDDING) for key in index.tensors if key.endswith(EMBEDDING)]
    if not ends:
        held = ", ".join(sorted(index.tensors)[:3]) or "none"
        reason = (
            f"has no tensor {EMBEDDING}, so it is not Megatron-Core's checkpoint of a language model; it has {held}"
        )
        raise refused(index.field, str(index.folder), reason, "give a checkpoint of megatron.core.dist_checkpointing.")
    return min(ends, key=len)  # an optimizer's state has the same names behind longer beginnings


def _places(
    index: CheckpointIndex, shape: ModelShape, prefix: str, parameter: str, placement: Placement
) -> Iterator[tuple[Piece, _Place]]:
    """Where the pieces of a parameter are; none if the checkpoint lacks it."""
    for key, leading in _keys(parameter, shape):
        tensor = index.tensors.get(prefix + key)
        if tensor is not None and len(tensor.shape) == len(leading) + len(placement.shape):
            for piece in placement.pieces:
                wanted = piece.extent if parameter in PADDED else placement.shape
                yield piece, _Place(tensor, leading, piece.target, wanted)
            return
        halves = [index.tensors.get(f"{prefix}{key}{end}") for end in HALVES]
        if None not in halves and len(placement.pieces) == len(halves):
            for piece, half in zip(placement.pieces, halves, strict=True):
                if half is not None:
                    yield piece, _Place(half, leading, piece.source, piece.extent)
            return


def _keys(parameter: str, shape: ModelShape) -> Iterator[tuple[str, Leading]]:
    """The keys under which Megatron's versions store a parameter."""
    if not parameter.startswith(LAYERS):
        yield parameter, ()
        return
    number, _, rest = parameter.removeprefix(LAYERS).partition(".")
    for name, leading in _keys_in_layer(rest, shape):
        yield f"{LAYERS}{name}", ((int(number), shape.layers), *leading)
        yield f"{LAYERS}{number}.{name}", leading


def _keys_in_layer(name: str, shape: ModelShape) -> Iterator[tuple[str, Leading]]:
    if not name.startswith(EXPERTS) or shape.experts is None:
        yield name, ()
        if name in SAME:
            yield SAME[name], ()
        return
    expert, _, linear = name.removeprefix(EXPERTS).partition(".")
    yield f"mlp.experts.experts.{linear}", ((int(expert), shape.experts.count),)
    yield f"mlp.experts.experts.{expert}.{linear}", ()
    yield f"mlp.experts.{linear}{expert}", ()
    yield name, ()


def _check_shape(index: CheckpointIndex, place: _Place, *, padded: bool) -> None:
    """Raises InvalidJob if the stored tensor is not the one that the config asks for. A padded vocabulary may have
    any number of rows from the model's own on."""
    found, wanted = place.tensor.shape, (*(size for _, size in place.leading), *place.shape)
    if padded:
        found = (*found[:-2], min(found[-2], wanted[-2]), found[-1])
    if found != wanted:
        reason = f"{place.tensor.key} is {place.tensor.shape}, the config asks for {wanted}"
        raise refused(index.field, str(index.folder), reason, "give the config.json of the model in this checkpoint.")
