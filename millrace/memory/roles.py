"""Micro-batches of the models that are run beside the policy."""

from millrace.spec.trainer import Role, Trainer


def role_tokens(trainer: Trainer, role: Role, tokens: int) -> int:
    """Tokens of a micro-batch of reference or critic where one of the policy has `tokens`: more or fewer in proportion
    to the token budgets."""
    return -(-tokens * trainer.of(role).token_budget // trainer.token_budget)
