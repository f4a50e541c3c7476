"""Plans on drawn layouts: executed on arrays of element numbers, nothing is missed, repeated or misplaced."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import PublicationFailed
from millrace.weights.plans.boxes import Boxes, disjoint, distinct, overlaps
from millrace.weights.plans.contents import UNEVEN
from millrace.weights.plans.layout import Layout, Place, most_dims, row_major_strides
from millrace.weights.plans.manifest import ITEM_BYTES, Manifest, TensorInfo
from millrace.weights.plans.sharded import plan
from millrace.weights.plans.wanted_pieces import ALIGNED
from tests.layouts import whole_layout


@st.composite
def manifests(draw):
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5))
    dtypes = st.sampled_from(["bfloat16", "float32", "uint8"])
    return Manifest(tuple(TensorInfo(f"t{i}", shape, draw(dtypes)) for i, shape in enumerate(shapes)))


@st.composite
def tilings(draw, shape, depth=3):
    """Boxes that cover a tensor once, cut anywhere."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, depth)) if shape else 0):
        offset, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extent[dim]))
        for start, length in ((0, at), (at, extent[dim] - at)):
            boxes.append((_with(offset, dim, offset[dim] + start), _with(extent, dim, length)))
    return boxes


@st.composite
def any_box(draw, shape):
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return tuple(a for a, _ in ends), tuple(b - a for a, b in ends)


@st.composite
def sides(draw):
    """A manifest, senders that hold all of it between them (and copies, and overlapping boxes), and receivers."""
    manifest = draw(manifests())
    count = draw(st.integers(1, 4))
    held = [[] for _ in range(count)]
    for i, info in enumerate(manifest.tensors):
        for box in draw(tilings(info.shape)):
            for rank in draw(st.sets(st.integers(0, count - 1), min_size=1)):
                held[rank].append((i, *box))
        if draw(st.booleans()):
            held[draw(st.integers(0, count - 1))].append((i, *draw(any_box(info.shape))))
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        wants = []
        for i, info in enumerate(manifest.tensors):
            wants += [(i, *draw(any_box(info.shape))) for _ in range(draw(st.integers(0, 2)))]
        kinds.append(wants)
    wanted = [kinds[k] for k in draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=5))]
    return manifest, [_laid(draw, manifest, h) for h in held], [_laid(draw, manifest, w) for w in wanted]


def _laid(draw, manifest, rows):
    """Each box in the rank's memory somewhere, row-major or column-major, some apart from the others."""
    places, reach = [], 0
    for tensor, offset, extent in rows:
        reach += draw(st.integers(0, 3))
        strides = row_major_strides(extent)
        if draw(st.booleans()):
            strides = tuple(reversed(row_major_strides(tuple(reversed(extent)))))
        places.append(Place(tensor, offset, extent, 0, reach, strides))
        reach += math.prod(extent)
    return Layout.of(places, manifest), reach


def boxes_of(side):
    return [layout.boxes for layout, _ in side]


def _with(values, dim, value):
    return (*values[:dim], value, *values[dim + 1 :])


def _view(memory, start, strides, extent):
    return np.lib.stride_tricks.as_strided(memory[start:], tuple(extent), tuple(s * memory.itemsize for s in strides))


def _number(info, offset, extent):
    """The element numbers of a box, as an array of its shape."""
    numbers = np.arange(math.prod(info.shape)).reshape(info.shape)
    box = tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=False))
    return numbers[box[: len(info.shape)]]


def _filled(manifest, layout, size):
    memory = np.full(size + 1, -1, np.int64)
    for row in range(len(layout.boxes)):
        info = manifest.tensors[layout.boxes.tensor[row]]
        numbers = _number(info, layout.boxes.offset[row], layout.boxes.extent[row])
        view = _view(memory, layout.start[row], layout.strides[row], layout.boxes.extent[row])
        view[...] = numbers.reshape(view.shape)
    return memory


@settings(max_examples=200)
@given(sides(), st.sampled_from([16, 64, 256, 1 << 20]), st.data())
def test_every_byte_arrives_once_at_its_place(drawn, message_bytes, data):
    manifest, senders, receivers = drawn
    ranks = len(senders) + len(receivers)
    hosts = data.draw(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=ranks, max_size=ranks))
    made = plan(manifest, boxes_of(senders), boxes_of(receivers), message_bytes, hosts)
    again = plan(manifest, boxes_of(senders), boxes_of(receivers), message_bytes, hosts)
    assert made.hash == again.hash
    held = [_filled(manifest, *s) for s in senders]
    got = [np.full(size + 1, -1, np.int64) for _, size in receivers]
    arrived: list[Counter] = [Counter() for _ in receivers]
    carried: dict[int, dict[int, list]] = {rank: {} for rank in range(made.world_size)}
    for number, source, target, content in made.hops.tolist():
        span = made.pieces_in(content)
        pieces = made.pieces.take(np.arange(span.start, span.stop))
        if source < len(senders):
            _, place = senders[source][0].locate(pieces, every=False)
            values = [
                _view(held[source], place.start[i], place.strides[i], pieces.extent[i]).copy()
                for i in range(len(pieces))
            ]
        else:
            before, values = carried[source][content]
            assert before < number  # passed on only once it is there
        carried[target][content] = (number, values)
        rows, place = receivers[target - len(senders)][0].locate(pieces, every=True)
        for i, row in enumerate(rows):
            view = _view(got[target - len(senders)], place.start[i], place.strides[i], pieces.extent[row])
            view[...] = values[row]
        for i in range(len(pieces)):
            tensor = int(pieces.tensor[i])
            numbers = _number(manifest.tensors[tensor], pieces.offset[i], pieces.extent[i])
            arrived[target - len(senders)].update((tensor, n) for n in numbers.reshape(-1).tolist())
    for (layout, size), memory, seen in zip(receivers, got, arrived, strict=True):
        assert np.array_equal(memory, _filled(manifest, layout, size))
        assert set(seen.values()) <= {1}


@settings(max_examples=100)
@given(sides(), st.sampled_from([64, 256]), st.booleans())
def test_rounds_are_bounded_and_in_order(drawn, message_bytes, apart):
    manifest, senders, receivers = drawn
    hosts = ["a"] * len(senders) + ["b"] * len(receivers) if apart else []
    made = plan(manifest, boxes_of(senders), boxes_of(receivers), message_bytes, hosts)
    sizes = made.pieces.numel * np.array([ITEM_BYTES[t.dtype] for t in manifest.tensors])[made.pieces.tensor]
    for content in range(len(made.sizes)):
        span = made.pieces_in(content)
        ends = np.append(made.at[span], made.sizes[content])
        assert (np.diff(ends) >= sizes[span]).all() and (made.at[span] % ALIGNED == 0).all()
    for rank in range(made.world_size):
        rounds = [step.round for step in made.steps(rank)]
        assert rounds == sorted(set(rounds))
        for step in made.steps(rank):
            assert len(step.sends) == len(set(step.sends)) and rank not in {peer for _, peer in step.sends}
    assert made.egress().sum() == made.ingress().sum()


def _manifest(*shapes):
    return Manifest(tuple(TensorInfo(f"t{i}", s, "bfloat16") for i, s in enumerate(shapes)))


def test_copies_of_a_box_share_the_sending():
    manifest = _manifest(*[(64, 64)] * 32)
    one = whole_layout(manifest).boxes
    made = plan(manifest, [one] * 4, [one], 4096 * 8)
    sent = made.egress()[:4]
    assert sent.sum() == manifest.bytes and sent.max() - sent.min() <= 2 * 64 * 64
    heaviest = max(sum(int(made.sizes[c]) for c, _ in step.receives) for step in made.steps(4))
    assert heaviest <= UNEVEN * 4096 * 8


def test_replicas_pass_on_what_one_sender_could_not_send_to_all():
    manifest = _manifest(*[(64, 64)] * 32)
    one = whole_layout(manifest).boxes
    made = plan(manifest, [one], [one] * 4, 4096 * 8)
    assert made.egress()[0] == manifest.bytes
    assert (made.ingress()[1:] == manifest.bytes).all()
    assert (made.egress()[1:4] == manifest.bytes).all() and made.egress()[4] == 0
    # A chain costs a round for each link, no more.
    assert made.rounds <= manifest.bytes // (4096 * 8) + 4


def test_what_nobody_holds_is_named():
    manifest = _manifest((8, 8), (4,))
    held = Boxes.of([(0, (0, 0), (8, 8)), (1, (0,), (3,))], 2)
    with pytest.raises(PublicationFailed, match="1 tensors: t1"):
        plan(manifest, [held], [whole_layout(manifest).boxes])


def test_boxes_survive_the_wire_and_damage_is_seen():
    boxes = whole_layout(_manifest((3, 5), (7,), ())).boxes
    again = Boxes.decode(boxes.encode())
    assert again.hash == boxes.hash and again.dims == 2
    with pytest.raises(ValueError, match="damaged"):
        Boxes.decode(boxes.encode()[:-3] + b"xyz")


def test_hash_sees_who_holds_and_who_wants():
    manifest = _manifest((8, 8), (4,))
    one = whole_layout(manifest).boxes
    half = Boxes.of([(0, (0, 0), (4, 8)), (1, (0,), (4,))], most_dims(manifest))
    hashes = {plan(manifest, s, r).hash for s, r in [([one], [one]), ([one, one], [one]), ([one], [half])]}
    assert len(hashes) == 3


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.tuples(st.integers(0, 5), st.integers(0, 5)),
            st.tuples(st.integers(1, 4), st.integers(1, 4)),
        ),
        max_size=12,
    )
)
def test_disjoint_boxes_cover_the_same(rows):
    def cells(boxes):
        return Counter(
            (int(t), int(o[0]) + i, int(o[1]) + j)
            for t, o, e in zip(boxes.tensor, boxes.offset, boxes.extent, strict=True)
            for i in range(e[0])
            for j in range(e[1])
        )

    boxes = distinct(Boxes.of(rows, 2))[0]
    apart = cells(disjoint(boxes))
    assert set(apart) == set(cells(boxes)) and set(apart.values()) <= {1}
    left, right = overlaps(boxes, boxes)
    pairs = {
        (i, j) for i, a in enumerate(zip(boxes.tensor, boxes.offset, boxes.extent, strict=True))
        for j, b in enumerate(zip(boxes.tensor, boxes.offset, boxes.extent, strict=True))
        if a[0] == b[0] and all(x < y + n and y < x + m for x, m, y, n in zip(a[1], a[2], b[1], b[2], strict=True))
    }  # fmt: skip
    assert set(zip(left.tolist(), right.tolist(), strict=True)) == pairs
