"""A step whose groups come in parts is the step of the whole batch: the same metrics, gradients and weights."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import InvalidState, NonFinite, OutOfMemory
from millrace.spec import JobSpec, presets
from millrace.spec.passes import needs_whole_batch
from services.trainer.backends import build
from services.trainer.memory.meter import MemoryMeter
from services.trainer.ranks.commands import ControlThread
from services.trainer.step.schedule import KlCoefficient
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import episode_groups, job_spec, random_groups, refs
from tests.services.trainer.memory.rank import Rank
from tests.services.trainer.ranks.test_ranks import EARLY
from tests.services.trainer.step.test_step import OPTIMIZER, Groups
from tests.services.trainer.steps import parts_of, train_step

JOBS: dict[str, dict[str, Any]] = {
    "everything in the loss": {
        "algorithm": {
            "kl": "k3",
            "kl_coefficient": 0.3,
            "kl_target": 0.01,
            "entropy_coefficient": 0.01,
            "correction": ["tis_token", "reject_token"],
            "off_policy_limit": 0.05,
        }
    },
    "critic, episodes, three updates": {
        "algorithm": {"advantage": {"name": "gae", "options": {"whiten": False}}, "critic": {}},
        "trainer": {"updates_per_step": 3},
        "schedule": {"prompts_per_step": 6},
    },
    "kl in the reward": {"algorithm": {"kl": "k1", "kl_in": "reward", "kl_coefficient": 0.1}},
    "the engine's log-probabilities, two updates": {
        "algorithm": {"old_logprobs": "rollout"},
        "trainer": {"updates_per_step": 2},
    },
    "sequences that are kept": {
        "algorithm": {
            "aggregation": "seq-mean-token-mean",
            "correction": {"name": "reject_sequence_sum", "options": {"estimator": "k2", "limit": 4.0}},
            "count_rejected_sequences": False,
        }
    },
}
APART = ("timing_s/", "perf/", "memory/", "batch/")
"""Metrics of how a step was made, and not of what it is."""


def spec_of(model: Path, **parts: Any) -> JobSpec:
    trainer = {"token_budget": 96, "optimizer": OPTIMIZER, **parts.pop("trainer", {})}
    if (critic := parts.get("algorithm", {}).get("critic")) is not None:
        parts["algorithm"] = {**parts["algorithm"], "critic": {**critic, "optimizer": OPTIMIZER}}
    return job_spec(model, trainer=trainer, **parts)


def assert_same(one: dict[str, float], other: dict[str, float]) -> None:
    """Relative 2e-5: sums over the batch have another order."""
    compared = [name for name in one if not name.startswith(APART)]
    assert compared == [name for name in other if not name.startswith(APART)] and len(compared) > 20
    for name in compared:
        assert other[name] == pytest.approx(one[name], rel=2e-5, abs=2e-6), name


def test_the_presets_that_wait_for_the_whole_batch_say_so(tied_model: Path) -> None:
    waiting = {name: needs_whole_batch(job_spec(tied_model, algorithm={"preset": name})) for name in presets.names()}
    assert {name for name, reason in waiting.items() if not reason} == set(EARLY)
    assert all(waiting[name].startswith("algorithm.advantage: ") for name in ("ppo", "reinforce++"))


@pytest.mark.parametrize(
    ("parts", "make"),
    [
        *(
            pytest.param(parts, episode_groups if "episodes" in name else random_groups, id=name)
            for name, parts in JOBS.items()
        ),
        *(
            pytest.param(
                {"algorithm": {"preset": name}},
                random_groups,
                id=f"preset {name}",
                marks=[] if name in ("dapo", "gspo") else pytest.mark.matrix,  # these two have all aggregations
            )
            for name in EARLY
        ),
    ],
)
def test_parts_equal_the_whole(
    parts: dict[str, Any],
    make: Callable[..., Groups],
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
) -> None:
    """Three steps in float32: every metric within 2e-5, and weights within 2e-6."""
    spec = spec_of(untied_model, **parts)
    assert needs_whole_batch(spec) == ""
    weights, metrics = [], []
    for sizes in ([(), (), ()], [(2, 3, 1), (1, 1, 1, 1, 1, 1), (5, 1)]):
        backend, coefficient = build(spec, one_rank), KlCoefficient(spec.algorithm.kl_coefficient)
        meter = MemoryMeter(spec, backend, rank=0, ranks=1)
        made = []
        for number, of_step in enumerate(sizes, 1):
            groups = served.script.groups = make(6, 4, seed=number)
            request = pb.StepRequest(job_id="job-1", step=number, groups=refs(groups), work_address=served.address)
            result = train_step(spec, backend, request, control, coefficient, meter, of_step)
            assert result.metrics["batch/parts"] == max(1, len(of_step))
            made.append(result.metrics)
        metrics.append(made)
        models = [backend, *([backend.critic] if backend.critic is not None else [])]
        weights.append([tensor.full_tensor() for model in models for tensor in model.state().values()])  # type: ignore[attr-defined]
    for whole, streamed in zip(*metrics, strict=True):
        assert_same(whole, streamed)
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(other, one, atol=2e-6, rtol=1e-5)


class Gradients:
    """A rank whose optimizer keeps the gradients that it gets, and changes no weight."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.backend: Any = rank.worker._loaded().backend
        self.seen: list[Tensor] = []
        self.backend.optimizer_step = self._step

    def _step(self, *, lr: float, gradient_scale: float) -> None:
        trained = self.backend._trained.values()
        found = [each.grad.full_tensor().flatten() * gradient_scale for each in trained if each.grad is not None]
        self.seen.append(torch.cat(found))
        self.backend.zero_gradients()

    def make(self, request: pb.StepRequest, sizes: list[int], deaths: list[int]) -> Tensor:
        """The gradient of the step, which after each of `deaths` parts in all begins anew: whoever sent the parts died,
        and sends them all again."""
        parts = parts_of(request, sizes)
        for made in deaths:
            for part in parts[: made % len(parts)]:
                self.rank.worker.add_part(pb.AddPartRequest(part=part))
        for part in parts[:-1]:
            self.rank.worker.add_part(pb.AddPartRequest(part=part))
        self.rank.worker.step(parts[-1])
        return self.seen[-1]


@contextmanager
def gradients(control: ControlThread, served: ScriptedCoordinator, model: Path) -> Iterator[Gradients]:
    yield Gradients(Rank(control, served, model, algorithm={"aggregation": "seq-mean-token-mean"}))


def test_any_order_and_any_death_give_the_same_gradient(
    one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, tied_model: Path
) -> None:
    with gradients(control, served, tied_model) as rank:
        groups = served.script.groups = random_groups(6, 2, seed=1)
        step = itertools.count(1)
        whole = pb.StepRequest(job_id="job-1", groups=refs(groups), work_address=served.address)

        def numbered(order: list[int]) -> pb.StepRequest:
            request = pb.StepRequest(job_id="job-1", step=next(step), work_address=served.address)
            request.groups.extend(whole.groups[number] for number in order)
            return request

        expected = rank.make(numbered(list(range(6))), [6], [])
        assert expected.norm() > 1e-3

        @settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(
            order=st.permutations(range(6)),
            cuts=st.sets(st.integers(1, 5)),
            deaths=st.lists(st.integers(0, 6), max_size=2),
        )
        def holds(order: list[int], cuts: set[int], deaths: list[int]) -> None:
            edges = [0, *sorted(cuts), 6]
            sizes = [last - first for first, last in itertools.pairwise(edges)]
            found = rank.make(numbered(order), sizes, deaths)
            assert (found - expected).norm() < 1e-5 * expected.norm()

        holds()


@pytest.mark.parametrize("failure", ["a bad number", "no memory"])
def test_a_part_that_fails_leaves_no_gradient(
    failure: str,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step then has to begin anew, and is as if nothing had been before."""
    with gradients(control, served, tied_model) as rank:
        groups = served.script.groups = random_groups(4, 2, seed=1)
        request = pb.StepRequest(job_id="job-1", step=1, groups=refs(groups), work_address=served.address)
        parts = parts_of(request, [2, 1, 1])
        rank.rank.worker.add_part(pb.AddPartRequest(part=parts[0]))
        with monkeypatch.context() as patch:
            if failure == "no memory":

                def full(*arguments: Any, **named: Any) -> Any:
                    raise torch.OutOfMemoryError("CUDA out of memory.")

                patch.setattr(rank.backend, "forward_backward", full)
            else:
                groups[parts[1].groups[0].prompt_id].trajectories[0].reward = math.nan
            with pytest.raises(OutOfMemory if failure == "no memory" else NonFinite):
                rank.rank.worker.add_part(pb.AddPartRequest(part=parts[1]))
        assert not any(each.grad is not None for each in rank.backend._trained.values())
        groups[parts[1].groups[0].prompt_id].trajectories[0].reward = 1.0
        with pytest.raises(InvalidState, match="has not the 2 parts before"):
            rank.rank.worker.step(parts[2])
        streamed = rank.make(request, [2, 1, 1], [])
        request.step = 2
        assert (streamed - rank.make(request, [4], [])).norm() < 1e-5 * streamed.norm()
