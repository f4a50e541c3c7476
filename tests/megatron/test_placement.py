import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.megatron.placement import Placement, shares, stack


def fill(placement, tensors):
    """A parameter put together as its placement says; NaN where it is padding."""
    out = np.full(placement.shape, np.nan)
    for piece in placement.pieces:
        source = tuple(slice(o, o + n) for o, n in zip(piece.source, piece.extent, strict=True))
        target = tuple(slice(o, o + n) for o, n in zip(piece.target, piece.extent, strict=True))
        out[target] = tensors[piece.tensor.name][source]
    return out


def whole(name, tensors):
    return Placement.whole(name, *tensors[name].shape)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.data())
def test_stacking_and_narrowing_do_as_with_arrays(rows_a, rows_b, width, data):
    tensors = {"a": np.arange(rows_a * width).reshape(rows_a, width) + 0.0, "b": -1.0 - np.zeros((rows_b, width))}
    placement = stack([whole("a", tensors), Placement.padding(2, width), whole("b", tensors)])
    expected = np.concatenate([tensors["a"], np.full((2, width), np.nan), tensors["b"]])
    for dim in (0, 1):
        start = data.draw(st.integers(0, placement.shape[dim] - 1))
        length = data.draw(st.integers(1, placement.shape[dim] - start))
        placement = placement.narrow(dim, start, length)
        expected = np.take(expected, range(start, start + length), axis=dim)
    assert placement.shape == expected.shape
    np.testing.assert_array_equal(fill(placement, tensors), expected)


@given(st.integers(1, 6), st.lists(st.integers(1, 4), max_size=2), st.data())
def test_any_run_of_a_flattened_parameter_is_boxes(rows, inner, data):
    width = math.prod(inner)
    tensors = {"a": np.arange(rows * width).reshape(rows, *inner) + 0.0}
    placement = stack([whole("a", tensors), Placement.padding(1, *inner)])
    flat = np.concatenate([tensors["a"].ravel(), np.full(width, np.nan)])
    first = data.draw(st.integers(0, flat.size - 1))
    last = data.draw(st.integers(first + 1, flat.size))
    run, found = flat[first:last], np.full((rows, *inner), np.nan)
    for share in shares(placement, first, last):
        strides = tuple(stride * run.itemsize for stride in share.strides)
        view = np.lib.stride_tricks.as_strided(run[share.start :], share.extent, strides)
        found[tuple(slice(o, o + n) for o, n in zip(share.source, share.extent, strict=True))] = view
    expected = np.where((np.arange(flat.size) >= first) & (np.arange(flat.size) < last), flat, np.nan)[: rows * width]
    np.testing.assert_array_equal(found.ravel(), expected)


def test_a_run_of_a_vector_is_one_box():
    (share,) = shares(Placement.whole("norm", 10), 3, 7)
    assert (share.source, share.extent, share.start, share.strides) == ((3,), (4,), 0, (1,))


def test_parts_that_would_not_be_equal_are_refused():
    with pytest.raises(ValueError, match=r"10 \(dimension 0 of \(10, 4\)\) does not divide into 3 parts"):
        Placement.whole("w", 10, 4).shard(0, 0, 3)
    assert math.prod(Placement.whole("w", 10, 4).shard(0, 1, 5).shape) == 8
