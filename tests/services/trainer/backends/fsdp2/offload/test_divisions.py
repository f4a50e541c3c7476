"""Copies of the model, shards and shared micro-batches, with any of the switches, compute what one rank computes.

Losses and gradients of an update are those of one rank without any switch within 2e-5, weights after two updates within
1e-5 on average: AdamW's first steps have the size of the learning rate, whatever sign rounding gives a gradient near 0.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.trainer.backends.fsdp2 import activation_offload as activations
from services.trainer.backends.fsdp2 import host_adamw
from services.trainer.protocol.microbatch import MicroBatch
from tests.forked import CONTEXT
from tests.services.trainer.backends.fsdp2.offload.test_combinations import (
    IGNORED,
    SWITCHES,
    THREE,
    built,
    lengths,
    micro_batches,
    updated,
)

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
RANKS = 4
CLOSE = 2e-5


@dataclass(frozen=True)
class Case:
    fsdp_size: int
    """Ranks of a copy of the model."""
    sequence_parallel_size: int
    """Ranks that share a micro-batch."""
    on: Sequence[str]
    lora: bool
    division: Sequence[Sequence[Sequence[int]]]
    """For each micro-batch the prompt and response lengths of its sequences."""


def on_rank(rank: int, folder: Path, model: Path, case: Case) -> None:
    """Two updates on this rank's share of the micro-batches; saves what it computed."""
    torch.set_num_threads(1)
    activations.SMALLEST_BYTES, host_adamw.PART_BYTES = 256, 20_000
    dist.init_process_group("cpu:gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    divided = {"fsdp_size": case.fsdp_size, "sequence_parallel_size": case.sequence_parallel_size}
    backend = built(model, torch.device("cpu"), dict.fromkeys(case.on, True), case.lora, **divided)
    batches, group = micro_batches([[(a, b) for a, b in batch] for batch in case.division]), backend.data_parallel
    batches += [MicroBatch.pack([], [])] * (-len(batches) % group.size)  # every rank has as many
    save_file(updated(backend, batches[group.rank :: group.size], 2), folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps([group.rank, group.size]))
    dist.destroy_process_group()


def check(folder: Path, model: Path, one_rank: torch.device, case: Case) -> None:
    processes = [CONTEXT.Process(target=on_rank, args=(rank, folder, model, case)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    batches = micro_batches([[(a, b) for a, b in batch] for batch in case.division])
    expected = updated(built(model, one_rank, {}, case.lora), batches, 2)
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * RANKS, asdict(case)
    for rank in range(RANKS):
        found = load_file(folder / f"{rank}.safetensors")
        number, groups = json.loads((folder / f"{rank}.json").read_text())
        own = expected["0.losses"][number::groups]
        torch.testing.assert_close(found["0.losses"][: len(own)], own, atol=CLOSE, rtol=CLOSE)
        gradients = {name: values for name, values in expected.items() if name.startswith("0.gradient.")}
        torch.testing.assert_close({name: found[name] for name in gradients}, gradients, atol=CLOSE, rtol=CLOSE)
        for name, values in expected.items():
            if name.startswith("1.weight."):
                assert (found[name] - values).abs().mean() < 1e-5, name


@pytest.mark.parametrize(
    "case",
    [
        # test_combinations.py has an adapter with parameters in host memory on one rank.
        pytest.param(
            Case(2, 2, ("offload_parameters", "offload_activations"), True, THREE), id="two copies, two share, LoRA"
        ),
        # test_sequence_parallel.py has these ranks with weights, optimizer and activations in host memory.
        pytest.param(Case(2, 4, SWITCHES, False, THREE), id="two copies, four share, all"),
    ],
)
def test_recommended_divisions(one_rank: torch.device, untied_model: Path, tmp_path: Path, case: Case) -> None:
    check(tmp_path, untied_model, one_rank, case)


divided_cases = given(
    case=st.builds(
        Case,
        fsdp_size=st.sampled_from((1, 2, 4)),
        sequence_parallel_size=st.sampled_from((1, 2, 4)),
        on=st.lists(st.sampled_from(SWITCHES), unique=True),
        lora=st.booleans(),
        division=st.lists(st.lists(lengths, min_size=1, max_size=3), min_size=1, max_size=6),
    )
)


@settings(max_examples=40, suppress_health_check=IGNORED)
@divided_cases
def test_many_drawn(
    one_rank: torch.device, tied_model: Path, tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    check(tmp_path_factory.mktemp("drawn"), tied_model, one_rank, case)
