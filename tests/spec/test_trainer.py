"""The token budgets of policy, reference and critic, lowered together."""

import pytest

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
