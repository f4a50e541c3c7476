"""Files of boxes: any cut is read from any other, whatever of it several ranks have; what is missing is told."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from millrace.errors import InvalidState
from services.trainer.checkpoints.box_files import BoxReader, assign_writers, key, write

SHAPE = (7, 5)
WHOLE = torch.arange(35, dtype=torch.float32).reshape(SHAPE)


def cut(rows: set[int], columns: set[int]) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """`WHOLE`, cut before these rows and columns: offset and box."""
    edges = [[0, *sorted(inner), size] for inner, size in zip((rows, columns), SHAPE, strict=True)]
    pairs = itertools.product(*(itertools.pairwise(edge) for edge in edges))
    return [((a, c), WHOLE[a:b, c:d]) for (a, b), (c, d) in pairs]


def store(folder: Path, boxes: list[tuple[tuple[int, int], torch.Tensor]], files: int) -> BoxReader:
    for number in range(files):
        mine = {key("w", offset, box.shape): box for offset, box in boxes[number::files]}
        write(folder / f"{number}.safetensors", mine)
    return BoxReader(sorted(folder.glob("*.safetensors")))


CUTS = st.tuples(st.sets(st.integers(1, 6)), st.sets(st.integers(1, 4)))


@settings(max_examples=40)
@given(written=CUTS, again=CUTS, wanted=CUTS, files=st.integers(1, 3))
def test_any_cut_is_read_from_any_other(
    written: tuple[set[int], set[int]],
    again: tuple[set[int], set[int]],
    wanted: tuple[set[int], set[int]],
    files: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Boxes of two cuts may overlap, as shares of copies do."""
    reader = store(tmp_path_factory.mktemp("boxes"), [*cut(*written), *cut(*again)], files)
    for offset, box in cut(*wanted):
        found = torch.full_like(box, -1)
        reader.fill("w", offset, found)
        assert torch.equal(found, box)


def test_what_is_in_no_file_is_told(tmp_path: Path) -> None:
    boxes = [part for part in cut({3}, {2}) if part[0] != (3, 2)]
    reader = store(tmp_path, boxes, 2)
    with pytest.raises(InvalidState, match=r"12 of the 35 numbers of w\[0:7,0:5\] are in no file"):
        reader.fill("w", (0, 0), torch.empty(SHAPE))
    with pytest.raises(InvalidState, match=r"other\[0:2\]"):
        reader.fill("other", (0,), torch.empty(2))


def test_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    boxes = {
        "half[0:3]": torch.ones(3, dtype=torch.bfloat16),
        "turned[0:5,0:7]": WHOLE.t(),
        "number[]": torch.tensor(3.5),
        "count[0:1]": torch.tensor([2**40]),
    }
    write(tmp_path / "some.safetensors", boxes)
    found = load_file(tmp_path / "some.safetensors")
    assert found.keys() == boxes.keys() and all(torch.equal(found[name], box) for name, box in boxes.items())
    number = torch.tensor(0.0)
    BoxReader([tmp_path / "some.safetensors"]).fill("number", (), number)
    assert number == 3.5
    write(tmp_path / "none.safetensors", {})
    assert load_file(tmp_path / "none.safetensors") == {}


@settings(max_examples=50)
@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=5))
def test_what_several_ranks_have_is_written_once_and_shared_out(held: list[set[int]]) -> None:
    offers = [{str(name): 10 + name for name in names} for names in held]
    shares = assign_writers(offers)
    everything = sorted(name for share in shares for name in share)
    assert everything == sorted({name for offer in offers for name in offer})
    assert all(set(share) <= offer.keys() for share, offer in zip(shares, offers, strict=True))


def test_copies_are_shared_out_evenly() -> None:
    offer = {f"w{number}": 100 + number for number in range(40)}
    loads = [sum(offer[name] for name in share) for share in assign_writers([offer] * 4)]
    assert max(loads) < 1.02 * min(loads)
