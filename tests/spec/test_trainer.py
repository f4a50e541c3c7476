"""The trainer's section: token budgets of policy, reference and critic, lowered together; and whether a job streams."""

from typing import Any

import pytest

from millrace.spec import parse
from millrace.spec.passes import why_not_streaming
from millrace.spec.trainer import CriticRun, ReferenceRun, Role, Trainer


def lowered(budget: int, reference: int | None = None, critic: int | None = None) -> dict[str, int]:
    """Budgets of a trainer of 1,024 tokens, lowered to `budget`."""
    own = Trainer(
        token_budget=1024, reference=ReferenceRun(token_budget=reference), critic=CriticRun(token_budget=critic)
    )
    trainer = own.lowered_to(budget)
    roles: tuple[Role, ...] = ("reference", "critic")
    return {"policy": trainer.token_budget, **{role: trainer.of(role).token_budget for role in roles}}


def test_roles_without_a_budget_have_the_policys() -> None:
    assert lowered(512) == {"policy": 512, "reference": 512, "critic": 512}


def test_larger_budgets_of_roles_fall_in_proportion() -> None:
    assert lowered(512, reference=4096, critic=2048) == {"policy": 512, "reference": 2048, "critic": 1024}
    assert lowered(300, reference=4096, critic=1025) == {"policy": 300, "reference": 1200, "critic": 300}


def test_smaller_budgets_of_roles_do_not_fall_below_the_policys() -> None:
    """The policy's is at least the longest sequence of the batch, which the role has to hold too."""
    assert lowered(512, reference=600, critic=400) == {"policy": 512, "reference": 512, "critic": 400}


@pytest.mark.parametrize("own", [16, 1000, 1024, 3001])
def test_the_whole_budget_changes_nothing(own: int) -> None:
    assert lowered(1024, reference=own, critic=own) == {"policy": 1024, "reference": own, "critic": own}


def whole_steps(**sections: Any) -> str:
    """Why such a job, strictly on-policy if it does not say otherwise, does not stream."""
    tree = {
        "name": "streaming",
        "output": "/output",
        "model": {"path": "/model"},
        "data": {"procedural": "reasoning_gym:spell_backward"},
        "schedule": {"max_staleness": 0},
        **sections,
    }
    return why_not_streaming(parse(tree))


def test_a_job_on_policy_streams_by_default() -> None:
    assert whole_steps() == whole_steps(trainer={"streaming": "auto"}) == ""
    assert whole_steps(trainer={"streaming": False}) == "trainer.streaming: false"


def test_with_staleness_a_job_streams_only_if_it_asks_for_it() -> None:
    assert whole_steps(schedule={"max_staleness": 2}).startswith("schedule.max_staleness: 2: ")
    assert whole_steps(schedule={"max_staleness": 2}, trainer={"streaming": True}) == ""


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"algorithm": {"preset": "ppo"}}, "algorithm.advantage"),
        ({"algorithm": {"top_entropy_fraction": 0.5}}, "algorithm.top_entropy_fraction"),
        ({"model": {"path": "/model", "lora": {"rank": 8, "dropout": 0.1}}}, "model.lora.dropout"),
        (
            {"trainer": {"backend": "megatron", "backend_options": {"release_gradients": True}}},
            "trainer.backend_options.release_gradients",
        ),
        (
            {"trainer": {"backend": "megatron", "backend_options": {"offload_parameters": True}}},
            "trainer.backend_options.offload_parameters",
        ),
    ],
)
def test_what_needs_the_whole_batch_is_named(sections: dict[str, Any], field: str) -> None:
    assert whole_steps(**sections).startswith(f"{field}: ")
    trainer = {**sections.get("trainer", {}), "streaming": True}
    assert whole_steps(**{**sections, "trainer": trainer}).startswith(f"{field}: ")


def test_dropout_of_zero_streams() -> None:
    assert whole_steps(model={"path": "/model", "lora": {"rank": 8, "dropout": 0.0}}) == ""
