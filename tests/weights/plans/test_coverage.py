"""Elements under strided views, against a set of every element's place."""

import itertools
import time

import numpy as np

from millrace.weights.plans.views import covered_elements


def slow(views):
    held = set()
    for start, extents, strides in views:
        for at in itertools.product(*(range(extent) for extent in extents)):
            held.add(start + sum(i * stride for i, stride in zip(at, strides, strict=True)))
    return len(held)


def test_every_element_counts_once():
    random = np.random.default_rng(0)
    for _ in range(300):
        rows, columns, depth = (int(n) for n in random.integers(1, 7, 3))
        memory = np.arange(rows * columns * depth).reshape(rows, columns, depth)
        views = []
        for _ in range(int(random.integers(1, 6))):
            cut = [sorted(random.integers(0, size + 1, 2)) for size in memory.shape]
            view = memory[tuple(slice(first, last, int(random.integers(1, 3))) for first, last in cut)]
            view = view.transpose(random.permutation(3))
            start = int(view.flat[0]) if view.size else 0
            views.append((start, view.shape, tuple(step // memory.itemsize for step in view.strides)))
        assert covered_elements(views) == slow(views), views


def test_empty_views_and_scalars():
    assert covered_elements([]) == 0
    assert covered_elements([(3, (0, 5), (5, 1)), (3, (), ()), (3, (1,), (7,)), (4, (2,), (1,))]) == 3


def test_a_model_of_hundreds_of_gigabytes_takes_no_memory_and_no_time():
    hidden, ffn, experts = 7168, 2048, 256
    expert = 2 * ffn * hidden
    rows = [(e * expert + half * ffn * hidden, (ffn, hidden), (hidden, 1)) for e in range(experts) for half in (0, 1)]
    columns = [(e * expert + half * ffn, (hidden, ffn), (2 * ffn, 1)) for e in range(experts) for half in (0, 1)]
    began = time.perf_counter()
    for views in (rows, columns, [*columns, (0, (experts, expert), (expert, 1))]):
        assert covered_elements(views) == experts * expert
        assert covered_elements(views[1 : 2 * experts]) == (experts * 2 - 1) * ffn * hidden
    assert time.perf_counter() - began < 60.0
