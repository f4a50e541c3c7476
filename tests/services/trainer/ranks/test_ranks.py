"""Two ranks do what one does, and a rank that dies or hangs is named."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from millrace.errors import MillraceError, NonFinite, Unavailable
from millrace.spec import presets
from millrace.spec.passes import needs_whole_batch
from services.trainer.ranks.commands import ControlThread
from tests.services.trainer.backends.fsdp2.test_backend import saved_tensors
from tests.services.trainer.coordinator import ScriptedCoordinator, coordinator
from tests.services.trainer.groups import episode_groups, job_spec, random_groups
from tests.services.trainer.process import IMPATIENT, TwoRanks, trainer
from tests.services.trainer.publication.receiver import Receiver, reference
from tests.services.trainer.step.test_result import assert_same_shown, step_of
from tests.services.trainer.step.test_step import OPTIMIZER, local_step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    log = tmp_path_factory.mktemp("two") / "log"
    with coordinator() as served, trainer(served, log, ranks=2) as running:
        yield TwoRanks(running, served)


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several updates, kl, entropy": {
        "algorithm": {"kl": {"name": "k3"}, "kl_coefficient": 0.5, "entropy_coefficient": 0.01},
        "trainer": {"updates_per_step": 2},
    },
    "correction, sequence mean, recompute": {
        "algorithm": {
            "correction": {"name": "icepop"},
            "aggregation": "seq-mean-token-mean",
            "advantage": {"name": "reinforce_plus_plus"},
        },
        "trainer": {"activation_recompute": True},
    },
    "tokens picked over the whole batch": {"algorithm": {"policy_loss": {"name": "kl_cov"}}},
    "tokens of high entropy, off-policy answers": {
        "algorithm": {
            "top_entropy_fraction": 0.3,
            "off_policy_limit": 0.05,
            "correction": ["tis_token", "reject_token"],
        },
        "trainer": {"updates_per_step": 2},
    },
    "a copy of the model on each rank": {"trainer": {"backend_options": {"fsdp_size": 1}}},
    "several rewards": {"algorithm": {"advantage": {"name": "gdpo"}}, "reward": {"parts": ["score", "format"]}},
    "greedy baseline": {"algorithm": {"advantage": {"name": "remax"}}},
    "squared probabilities": {"algorithm": {"advantage": {"name": "optimal_token_baseline"}}},
}
EXACT = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "rollout_corr/kl", "actor/ratio_p99")


SIZES: dict[int, tuple[int, ...]] = {1: (), 2: (1, 2, 1), 3: (2, 2)}
"""By step the groups of its parts, of four groups."""


EARLY = [name for name in presets.names() if name not in ("ppo", "reinforce++")]
"""The presets that need no whole batch. `step/test_streaming.py` has them on one rank."""


def untimed(metrics: dict[str, float]) -> set[str]:
    """Names of metrics, without those that a part of the step has only if it took long enough."""
    return {name for name in metrics if not name.startswith("perf/mfu/")}


WITH_PADDING = ("plain",)
"""The jobs that `make test` has with one sample a prompt: padding is the same for all of them."""
OF_EPISODES = ("correction, sequence mean, recompute", "squared probabilities")
"""The jobs that are compared on episodes of several turns and trajectories."""
OTHERWISE = (*WITH_PADDING, *OF_EPISODES, "several rewards", "greedy baseline")
"""The jobs that `make test` has in one of these ways, and `make test-all` with four samples a prompt too. The last two
differ in the advantage alone: step/test_every_algorithm.py has theirs on one rank."""


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        *(pytest.param(name, 4, marks=[pytest.mark.matrix] if name in OTHERWISE else []) for name in JOBS),
        *(pytest.param(f"preset {name}", 4, marks=pytest.mark.matrix) for name in EARLY),
        *(pytest.param(name, 1, marks=[] if name in WITH_PADDING else pytest.mark.matrix) for name in JOBS),
        *((name, 0) for name in OF_EPISODES),
    ],
)
def test_two_ranks_equal_one(
    name: str,
    samples: int,
    two_ranks: TwoRanks,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
    tmp_path: Path,
) -> None:
    """Relative 2e-6 of loss and gradient norm; with one sample a prompt, one rank has padding in some micro-batches.
    With `samples` 0 there are episodes, whose trajectories may be on both ranks. The two ranks get the second and the
    third step in parts, if the job allows it."""
    parts = JOBS[name] if name in JOBS else {"algorithm": {"preset": name.removeprefix("preset ")}}
    prompts = 2 if samples == 1 else 4
    trainer = {"token_budget": 64, "optimizer": OPTIMIZER, **parts.get("trainer", {})}
    schedule = {"prompts_per_step": prompts}
    spec = job_spec(untied_model, **{**parts, "trainer": trainer, "schedule": schedule})
    backend, step = local_step(spec, one_rank, control, served)
    job = f"job-{name}-{samples}".replace(", ", "-").replace(" ", "-")
    two_ranks.calls.configure(spec, job=job)
    for number in (1, 2, 3):
        groups = random_groups(prompts, samples, seed=number) if samples else episode_groups(prompts, 3, seed=number)
        sizes = SIZES[number] if prompts == 4 else (1, 1)
        sizes = () if needs_whole_batch(spec) else sizes
        alone, together = step(number, groups), two_ranks.step(number, groups, job, sizes)
        assert untimed(alone) == untimed(together)
        assert together["batch/parts"] == max(1, len(sizes))
        for metric in EXACT:
            if metric in alone:
                assert together[metric] == pytest.approx(alone[metric], rel=2e-6, abs=2e-7), (number, metric)
    two_ranks.calls.save(str(tmp_path / "saved"), huggingface=True, job=job)
    saved = saved_tensors(tmp_path / "saved" / "huggingface")
    for info, tensor in backend.export("float32"):
        assert tensor is not None
        torch.testing.assert_close(saved[info.name], tensor, atol=2e-6, rtol=1e-5)


def test_two_ranks_tell_of_shown_groups_what_one_tells(
    two_ranks: TwoRanks,
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
) -> None:
    """The trajectories of a group may be on both ranks."""
    parts, groups = JOBS["several updates, kl, entropy"], episode_groups(4, 3, seed=1)
    spec = job_spec(untied_model, **{**parts, "trainer": {"token_budget": 64, **parts["trainer"]}})
    two_ranks.calls.configure(spec, job="job-shown")
    two_ranks.served.script.groups = groups
    together = two_ranks.calls.step(1, groups, two_ranks.served.address, "job-shown")
    assert_same_shown(step_of(spec, groups, one_rank, control, served).shown, together.shown, most=2e-5)


def test_each_rank_fetches_its_own(two_ranks: TwoRanks, tied_model: Path) -> None:
    two_ranks.calls.configure(job_spec(tied_model, schedule={"prompts_per_step": 8}), job="job-fetch")
    groups = random_groups(8, 1)
    two_ranks.served.script.fetches.clear()
    two_ranks.step(1, groups, "job-fetch")
    first, second = two_ranks.served.script.fetches
    assert not set(first) & set(second) and set(first) | set(second) == set(groups)


def test_an_error_of_one_rank_is_that_of_both(two_ranks: TwoRanks, tied_model: Path) -> None:
    two_ranks.calls.configure(job_spec(tied_model), job="job-nan")
    groups = random_groups(4, 4)
    bad = list(groups)[1]
    groups[bad].trajectories[2].reward = float("inf")
    with pytest.raises(NonFinite, match=f"prompt {bad}, sample 2"):
        two_ranks.step(1, groups, "job-nan")
    lacking = random_groups(4, 4)
    two_ranks.served.script.groups = dict(list(lacking.items()))
    lacking[bad].trajectories[3].logprobs = b""
    with pytest.raises(MillraceError, match=f"prompt {bad}, sample 3 cannot be trained"):
        two_ranks.step(1, lacking, "job-nan")
    assert two_ranks.step(1, random_groups(4, 4), "job-nan")["actor/grad_norm"] > 0


@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
def test_published_by_two_ranks_bit_for_bit(
    two_ranks: TwoRanks, model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    job = f"job-{model}"
    two_ranks.calls.configure(job_spec(request.getfixturevalue(model), trainer={"optimizer": OPTIMIZER}), job=job)
    two_ranks.step(1, random_groups(4, 4), job)
    ref = reference(1, job=job)
    prepared = two_ranks.calls.prepare(ref, 1, "float32")
    receiver = Receiver(ref, prepared)
    sent = two_ranks.calls.transfer(ref)
    received = receiver.wait()
    assert list(sent.checksums.values) == receiver.checksums() and sent.report.gather_s > 0
    two_ranks.calls.finish(ref)
    receiver.close()
    two_ranks.calls.save(str(tmp_path / "saved"), huggingface=True, job=job)
    saved = saved_tensors(tmp_path / "saved" / "huggingface")
    assert saved.keys() == received.keys()
    for name, tensor in received.items():
        assert torch.equal(tensor, saved[name]), name


# a killed rank: tests/services/trainer/backends/megatron/test_job.py has one too
@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.matrix), signal.SIGSTOP])
def test_a_lost_rank_is_named_and_the_trainer_ends(
    how: signal.Signals, served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    by_command = how == signal.SIGKILL  # by which torchrun ends the others
    with trainer(served, tmp_path / "log", ranks=2, by_command=by_command, **IMPATIENT) as running:
        calls = running.calls()
        calls.configure(job_spec(tied_model))
        served.script.groups = random_groups(4, 4)
        served.script.hold.clear()
        stepping = running.in_background(lambda: calls.step(1, served.script.groups, served.address))
        while len(served.script.fetches) < 2:
            time.sleep(0.05)
        ranks = running.ranks()
        lost = ranks[1]
        lost.send_signal(how)
        served.script.hold.set()
        with pytest.raises(Unavailable, match=rf"rank 1 on .*\(pid {lost.pid}\)"):
            stepping.result(120)
        if how == signal.SIGSTOP:
            lost.send_signal(signal.SIGCONT)
        assert running.process.wait(60) != 0
        assert not psutil.wait_procs(ranks, timeout=60)[1]


@pytest.mark.matrix  # test_a_lost_rank_is_named_and_the_trainer_ends sees that every process is gone
@pytest.mark.parametrize("killed", ["torchrun", "rank 0"])
def test_nothing_is_left_behind(killed: str, served: ScriptedCoordinator, tied_model: Path, tmp_path: Path) -> None:
    with trainer(served, tmp_path / "log", ranks=2, by_command=True) as running:
        running.calls().configure(job_spec(tied_model))
        ranks = running.ranks()
        victim = running.process if killed == "torchrun" else ranks[0]
        victim.send_signal(signal.SIGKILL)
        assert running.process.wait(60) != 0
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
