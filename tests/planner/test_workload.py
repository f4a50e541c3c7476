"""Lengths and passes of a step."""

import random

import pytest

from millrace.errors import InvalidJob
from millrace.planner.workload import Workload, workload
from tests.memory.jobs import job
from tests.planner.jobs import preset


def work(mean: float, longest: int = 4096, **changes: object) -> Workload:
    return workload(job(rollout={"max_response_tokens": longest, **changes}), mean_response=mean)


@pytest.mark.parametrize("mean", [200.0, 1000.0, 3000.0, 4096.0])
def test_the_lengths_have_the_mean_that_was_given(mean: float) -> None:
    lengths = work(mean).responses
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.02)
    assert lengths == sorted(lengths) and lengths[-1] <= 4096


def test_the_lengths_are_those_of_drawing_an_end_at_every_token() -> None:
    drawn = random.Random(0)
    lengths = sorted(min(512, 1 + int(drawn.expovariate(1 / 300))) for _ in range(20_000))
    expected = work(sum(lengths) / len(lengths), 512).responses
    for share in (0.1, 0.25, 0.5, 0.75):
        assert expected[int(share * len(expected))] == pytest.approx(lengths[int(share * len(lengths))], rel=0.05)


def test_the_flops_are_those_of_every_sequence() -> None:
    from millrace.megatron.architectures.published import shape_of
    from millrace.megatron.architectures.shape import sequence_cost

    made, cost = work(1000.0), sequence_cost(shape_of("qwen3-8b"))
    each = [cost.of(round(made.mean_prompt + length)) for length in made.responses]
    assert made.flops(cost) == pytest.approx(sum(each) * made.sequences / len(each), rel=0.01)


def test_passes_are_those_that_the_trainer_makes() -> None:
    assert workload(job()).passes.policy == 0
    assert workload(job(updates_per_step=2)).passes.policy == 1
    with_kl = workload(job(algorithm={"kl": "k3", "old_logprobs": "rollout"}, updates_per_step=2)).passes
    assert (with_kl.policy, with_kl.reference) == (0, 1)
    assert workload(job(algorithm={"preset": "ppo"})).passes.values


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({"policy_loss": "clip_cov"}, 1),
        ({"policy_loss": "kl_cov"}, 1),
        ({"advantage": "optimal_token_baseline"}, 2),
        ({"kl": "k1", "kl_in": "reward"}, 1),
        ({"top_entropy_fraction": 0.5}, 1),
    ],
    ids=str,
)
def test_what_reads_the_policy_before_the_update_costs_a_pass(algorithm: dict[str, object], passes: int) -> None:
    """With one update; the trainer makes the passes that the same rule names."""
    assert workload(job(algorithm=algorithm)).passes.policy == passes


def test_a_mean_over_the_longest_is_refused() -> None:
    with pytest.raises(InvalidJob, match="--mean-response: 5000: is more than the longest that the job allows, 4096"):
        work(5000)


def test_tokens_of_images_are_part_of_the_prompt_of_a_job_with_images() -> None:
    shown = preset("qwen2.5-vl-7b-lora-8gpu", data={"max_prompt_tokens": 400})
    assert workload(job()).image_tokens == 0.0
    assert workload(shown).image_tokens == 50.0 and workload(shown, image_tokens=0.0).image_tokens == 0.0
    with pytest.raises(InvalidJob, match=r"--mean-image-tokens: .* more than the mean prompt, which has them, 100"):
        workload(shown, image_tokens=101.0)
    with pytest.raises(InvalidJob, match=r"--mean-image-tokens: .* no data\.images"):
        workload(job(), image_tokens=10.0)
