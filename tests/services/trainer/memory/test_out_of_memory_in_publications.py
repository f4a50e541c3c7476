"""A rank that has no memory left in a publication: what is said, and the next publication succeeds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.errors import OutOfMemory, PublicationFailed
from tests.services.trainer.backends.megatron.launch import launch
from tests.services.trainer.memory.publications import GATHERED, SHARDED, Publications, without_memory
from tests.services.trainer.memory.rank import Rank

PHASES = {
    "describe": "describing what is published",
    "prepare": "preparing a publication",
    "transfer": "a publication",
    "gather": "a publication",
}


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOST", "127.0.0.1")


@pytest.mark.parametrize("phase", PHASES)
def test_the_error_says_what_was_done_and_the_next_publication_succeeds(
    phase: str,
    new_rank: Callable[..., Rank],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where tensors are gathered the rank is alone with its failure, and the error is of another kind."""
    publications = Publications(new_rank(tied_model).worker)
    kind, path = (OutOfMemory, GATHERED) if phase == "gather" else (PublicationFailed, SHARDED)
    with monkeypatch.context() as patch:
        without_memory(patch, phase, publications.rank)
        with pytest.raises(kind, match=f"^rank 0 ran out of memory in {PHASES[phase]}. Predicted for") as raised:
            publications.attempt(path)
    assert "weights" in raised.value.what and "saves about" in raised.value.fix
    if publications.receiver is not None and phase == "transfer":
        failure = publications.receiver.failure
        assert failure is not None and "ran out of memory" in failure.what
    received = publications.attempt()
    assert len(received) > 20 and not publications.wrong(received)


@pytest.mark.slow
def test_all_ranks_and_the_receiver_are_told_of_one(tied_model: Path, tmp_path: Path) -> None:
    """The error is the same on both ranks, and the trainer goes on."""
    told = launch(
        2, tmp_path / "ranks", module="tests.services.trainer.memory.publishing_ranks", arguments=str(tied_model)
    )
    for phase in ("describe", "prepare", "transfer"):
        first, second = told[phase]
        assert first == second and first.startswith(f"rank 1 ran out of memory in {PHASES[phase]}. Predicted"), first
        assert "saves about" in first
    assert "rank 1 ran out of memory" in told["receiver"]
    assert told["wrong"] == []
