"""Algorithms that cannot work are refused when the job is submitted, with the field, the reason and the fix."""

from pathlib import Path
from typing import Any

import pytest

from millrace.admission import choices
from millrace.errors import InvalidJob
from millrace.spec import JobSpec, parse


def job(algorithm: dict[str, Any], **parts: Any) -> JobSpec:
    tree = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["train.parquet"]}}
    return parse({**tree, "algorithm": algorithm, **parts})


def told(algorithm: dict[str, Any], **parts: Any) -> str:
    with pytest.raises(InvalidJob) as refusal:
        choices.check(job(algorithm, **parts))
    return str(refusal.value)


GDPO = {"advantage": {"name": "gdpo"}}
PARTS = {"parts": ["score", "format"]}
CUT = {"rollout": {"top_p": 0.9, "top_k": 20}}
MEGATRON = {"trainer": {"backend": "megatron"}}


@pytest.mark.parametrize(
    ("algorithm", "parts", "field", "fix"),
    [
        ({"advantage": {"name": "gae"}}, {}, 'algorithm.advantage.name: "gae": it needs a critic', "grpo"),
        ({"critic": {}}, {}, "algorithm.critic: {}: the advantage 'grpo' reads no values", "leave it out"),
        (GDPO, {}, 'algorithm.advantage.name: "gdpo": it needs several rewards', "reward.parts"),
        ({}, {"reward": PARTS}, "reward.parts: [", "leave it out"),
        (
            {"advantage": {"name": "gdpo", "options": {"weights": [1.0]}}},
            {"reward": PARTS},
            "algorithm.advantage.options.weights: [1.0]: reward.parts names 2 rewards",
            "one weight a reward",
        ),
        (
            {**GDPO, "overlong_buffer_tokens": 5},
            {"reward": PARTS},
            "algorithm.overlong_buffer_tokens: 5",
            "reward.parts",
        ),
        ({**GDPO, "kl": {"name": "k1"}, "kl_in": "reward"}, {"reward": PARTS}, 'algorithm.kl_in: "reward"', "the loss"),
        ({"aggregation": "mean"}, {}, 'algorithm.aggregation: "mean"', "token-mean"),
        ({"kl": {"name": "k9"}}, {}, 'algorithm.kl.name: "k9"', "k3"),
        ({"kl": {"name": "k1", "options": {"a": 1}}}, {}, "algorithm.kl.options", "remove"),
        (
            {"policy_loss": {"name": "ppo", "options": {"clip": 1}}},
            {},
            "algorithm.policy_loss.options.clip",
            "clip_low",
        ),
        ({"correction": {"name": "tis"}}, {}, "algorithm.correction.name", "tis_token"),
        *(
            (
                {"old_logprobs": "rollout", "correction": name},
                {},
                f'algorithm.correction.name: "{name}": with algorithm.old_logprobs: rollout',
                "recompute",
            )
            for name in ("tis_token", "tis_sequence", "tis_geometric", "icepop", "icepop_sequence")
        ),
        (
            {"correction": ["reject_token", "tis_token", "icepop"]},
            {},
            'algorithm.correction.2.name: "icepop": tis_token gives weights already',
            "keep one of the two",
        ),
        (
            {"old_logprobs": "rollout", "correction": ["reject_token", "icepop_sequence"]},
            {},
            'algorithm.correction.1.name: "icepop_sequence": with algorithm.old_logprobs: rollout',
            "recompute",
        ),
        ({"correction": ["tis"]}, {}, 'algorithm.correction.0.name: "tis"', "tis_token"),
        (
            {"correction": ["tis_token", {"name": "reject_token", "options": {"limt": 1.0}}]},
            {},
            "algorithm.correction.1.options.limt: 1.0: ",
            "did you mean `limit`?",
        ),
        (
            {"correction": {"name": "tis_token", "options": {"cap": 0.5, "floor": 0.9}}},
            {},
            "algorithm.correction.options.floor: 0.9: is above the cap, 0.5",
            "make it at most the cap.",
        ),
        (
            {"correction": "reject_token", "normalize_correction_weights": True},
            {},
            "algorithm.normalize_correction_weights: true: there is no correction that gives weights",
            "correction: tis_token",
        ),
        (
            {"policy_loss": "decoupled_ppo", "correction": "tis_token"},
            {},
            "algorithm.correction.name: \"tis_token\": the policy loss 'decoupled_ppo' weights by",
            "reject_token",
        ),
        ({"correction": "reject_token"}, CUT, "rollout.top_p: 0.9: ", "leave algorithm.correction out."),
        ({"old_logprobs": "rollout"}, CUT, "rollout.top_k: 20: ", "set it to 0, or set algorithm.old_logp"),
        (
            {"off_policy_limit": 0.5},
            CUT,
            "rollout.top_p: 0.9: ",
            "set it to 1, or leave algorithm.off_policy_limit out.",
        ),
        ({"policy_loss": "decoupled_ppo"}, CUT, "rollout.top_p: 0.9: ", "set it to 1, or choose the policy"),
    ],
)
def test_refused_with_the_fix(algorithm: dict[str, Any], parts: dict[str, Any], field: str, fix: str) -> None:
    text = told(algorithm, **parts)
    assert field in text and fix in text


def test_every_mistake_is_told() -> None:
    text = told({"aggregation": "mean", "kl": {"name": "k9"}, "advantage": {"name": "gae"}})
    assert text.count("Fix: ") == 3


@pytest.mark.parametrize(
    ("critic", "schedule", "words"),
    [
        ({"warmup_steps": 10}, {"steps": 10}, "algorithm.critic.warmup_steps: 10: the policy would not be"),
        ({"optimizer": {"schedule": "linear"}}, {}, 'algorithm.critic.optimizer.schedule: "linear"'),
        ({"clip": 0}, {}, "algorithm.critic.clip: 0: "),
    ],
)
def test_critics_that_make_no_sense(critic: dict[str, Any], schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidJob) as refusal:
        job({"preset": "ppo", "critic": critic}, schedule=schedule)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("advantage", "least"),
    [
        *((name, 2) for name in ("grpo", "rloo", "gpg", "opo", "maxrl", "grpo_passk", "optimal_token_baseline")),
        ("reinforce_plus_plus_baseline", 2),
        ({"name": "grpo", "options": {"std": False}}, 2),
        ("passk", 4),
        ({"name": "passk", "options": {"k": 8}}, 8),
    ],
)
def test_answers_are_compared_with_others(advantage: Any, least: int) -> None:
    algorithm = {"advantage": advantage}
    text = told(algorithm, rollout={"samples_per_prompt": least - 1})
    assert f"rollout.samples_per_prompt: {least - 1}: the advantage" in text
    assert f"raise it to at least {least}" in text
    choices.check(job(algorithm, rollout={"samples_per_prompt": least}))
    text = told(algorithm, rollout={"samples_per_prompt": least, "min_samples": least - 1})
    assert f"rollout.min_samples: {least - 1}: the advantage" in text


def test_one_answer_is_enough_where_none_is_compared() -> None:
    alone = {"samples_per_prompt": 1}
    for advantage in ("remax", "reinforce_plus_plus", {"name": "grpo", "options": {"singleton": "reward"}}):
        choices.check(job({"advantage": advantage}, rollout=alone))
    choices.check(job({"preset": "ppo"}, rollout=alone))


def test_a_target_needs_a_kl() -> None:
    with pytest.raises(InvalidJob, match=r"algorithm\.kl_target: 0\.1: there is no KL to steer"):
        job({"kl_target": 0.1})


def test_a_coefficient_of_0_cannot_be_steered() -> None:
    with pytest.raises(InvalidJob, match=r"algorithm\.kl_coefficient: 0\.0: kl_target multiplies it"):
        job({"kl": "k3", "kl_target": 0.1, "kl_coefficient": 0.0})
    assert job({"kl": "k3", "kl_target": 0.1}).algorithm.kl_coefficient > 0


def test_experts_are_replayed_by_megatron_alone() -> None:
    with pytest.raises(InvalidJob, match=r"algorithm\.router_replay: true: the backend fsdp2 cannot send"):
        job({"router_replay": True})
    assert job({"router_replay": True}, **MEGATRON).algorithm.router_replay


def test_what_can_work_is_taken(tmp_path: Path) -> None:
    for algorithm, parts in (
        ({"preset": "ppo"}, {}),
        ({"preset": "ppo"}, MEGATRON),
        (GDPO, {"reward": PARTS}),
        ({"advantage": {"name": "remax"}}, MEGATRON),
        ({"advantage": {"name": "optimal_token_baseline"}}, MEGATRON),
        ({"old_logprobs": "rollout", "correction": "reject_sequence_mean"}, {}),
        ({"old_logprobs": "rollout", "policy_loss": "gpg", "correction": "tis_token"}, {}),
        ({"policy_loss": "decoupled_ppo", "correction": "reject_token"}, {}),
        ({"policy_loss": "decoupled_ppo"}, {}),
        ({"correction": ["tis_sequence", "reject_token", {"name": "reject_sequence_mean"}]}, {}),
        ({"correction": "icepop", "normalize_correction_weights": True}, {}),
        ({}, CUT),
    ):
        choices.check(job(algorithm, **parts))
