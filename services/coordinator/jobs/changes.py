"""What of a job's spec may be other when the job is continued: what it runs with, not what it learns from."""

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.errors import InvalidJob
from millrace.spec.merging import merged
from millrace.validation.kinds import leaves

CHANGEABLE = {
    "deadlines": False,
    "tracking": False,
    "publication": False,
    "reward.workers": False,
    "reward.timeout_s": False,
    "reward.memory_mb": False,
    "rollout.engine_options": False,
    "rollout.cache_policy": False,
    "rollout.lease_s": False,
    "schedule.save_every_steps": False,
    "schedule.keep_checkpoints": False,
    "schedule.keep_best": False,
    "schedule.stop_when": False,
    "schedule.save_in_background": True,
    "schedule.steps": True,
    "model.use_shm": True,
    "trainer.token_budget": True,
    "trainer.on_out_of_memory": False,
    "trainer.activation_recompute": True,
    "trainer.backend_options": True,
    "trainer.optimizer": True,
    "trainer.reference": True,
    "trainer.critic": True,
}
"""Fields, or groups of them, and whether the trainer has to load the job anew for it: from its last checkpoint, or from
the model where there is none."""
TOKEN_BUDGETS = {"trainer.token_budget", "trainer.reference.token_budget", "trainer.critic.token_budget"}


def applied(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The spec's tree with the changes in it, and whether the trainer has to load it anew. Of a group the fields that
    are not named stay; null removes an option of an engine or backend. Raises InvalidJob for a field that has to
    stay."""
    anew = False
    for path in _paths(changes):
        allowed = next((name for name in CHANGEABLE if path == name or path.startswith(f"{name}.")), None)
        if allowed is None:
            what = f"{path}: a job that is continued keeps it."
            raise InvalidJob(what, f"submit a new job, or change one of {', '.join(CHANGEABLE)}.")
        anew |= CHANGEABLE[allowed]
    return merged(tree, changes), anew


def gives_token_budget(changes: Mapping[str, Any]) -> bool:
    """Whether the changes name a token budget, of the policy or of a role, be it the one that the spec has."""
    return any(path in TOKEN_BUDGETS for path, _ in leaves(changes))


def _paths(changes: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in changes.items():
        if isinstance(value, Mapping) and value and above + name not in CHANGEABLE:
            yield from _paths(value, f"{above}{name}.")
        else:
            yield above + name
