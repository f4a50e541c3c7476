"""Rules about the pools of a job: each is named once and used for one task, and nothing refers to a missing one."""

from collections.abc import Iterator

from millrace.errors import Mistake, wrong_value
from millrace.spec.job import JobSpec
from millrace.spec.pools.pool import ROLLOUT
from millrace.validation.names import choose


def broken_rules(spec: JobSpec) -> Iterator[Mistake]:
    """Every rule that the pools break."""
    names = [pool.name for pool in spec.pools]
    for number, name in enumerate(names):
        field = f"pools.{number}.name"
        if name == ROLLOUT:
            yield wrong_value(field, name, "is the pool of the replicas that generate", "choose another name.")
        elif name in names[:number]:
            yield wrong_value(field, name, "an earlier pool has this name", "give each pool a name of its own.")
        elif not (tasks := spec.pool_tasks(name)):
            fix = "name it in one of reward.functions or in algorithm.distillation, or remove it."
            yield wrong_value(field, name, "nothing in the job uses this pool", fix)
        elif len(tasks) > 1:
            reason = f"it is used for {' and for '.join(sorted(tasks))}, which no model gives"
            yield wrong_value(field, name, reason, "declare a pool for each.")
    for field, name in _named(spec):
        if name not in names:
            fix = choose(name, names) if names else f"declare it: pools: [{{name: {name}, path: /data/MODEL}}]."
            yield wrong_value(field, name, "there is no such pool", fix)
    for number, each in enumerate(spec.reward.functions):
        field = f"reward.functions.{number}"
        if each.pool is None:
            continue
        if each.function is not None or each.judge is not None:
            other = "a function" if each.function is not None else "a judge"
            yield wrong_value(f"{field}.pool", each.pool, f"{other} is given too", "give one of the two.")
        for given, value in (("options", each.options), ("scope", each.scope)):
            if value not in ({}, "answer"):
                reason = "a pool scores each answer by itself and has no options"
                yield wrong_value(f"{field}.{given}", value, reason, "leave it out.")


def _named(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Each field that names a pool, and the name."""
    for number, each in enumerate(spec.reward.functions):
        if each.pool is not None:
            yield f"reward.functions.{number}.pool", each.pool
        if each.judge is not None and each.judge.pool is not None:
            yield f"reward.functions.{number}.judge.pool", each.judge.pool
    if spec.algorithm.distillation is not None:
        yield "algorithm.distillation.pool", spec.algorithm.distillation.pool
