"""Rules of pools and judges: what scores answers with a model of its own. Pure, like `millrace.spec.rules`."""

from collections.abc import Iterator

from millrace.errors import Mistake, wrong_value
from millrace.spec.job import JobSpec
from millrace.spec.pool import ROLLOUT, Judge
from millrace.validation.names import choose

OF_REQUEST = ("model", "messages", "stream", "n")
"""Fields of a request that are not options."""


def broken_pools(spec: JobSpec) -> Iterator[Mistake]:
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
    for field, name in _named_pools(spec):
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


def _named_pools(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Each field that names a pool, and the name."""
    for number, each in enumerate(spec.reward.functions):
        if each.pool is not None:
            yield f"reward.functions.{number}.pool", each.pool
        if each.judge is not None and each.judge.pool is not None:
            yield f"reward.functions.{number}.judge.pool", each.judge.pool
    if spec.algorithm.distillation is not None:
        yield "algorithm.distillation.pool", spec.algorithm.distillation.pool


def broken_judges(spec: JobSpec) -> Iterator[Mistake]:
    """Every rule that the judges break."""
    for number, each in enumerate(spec.reward.functions):
        field = f"reward.functions.{number}"
        if each.judge is None:
            if each.function is None and each.pool is None:
                reason = "neither a function nor a judge nor a pool is given"
                yield wrong_value(f"{field}.name", each.name, reason, "give one of the three.")
            continue
        if each.function is not None:
            yield wrong_value(f"{field}.function", each.function, "a judge is given too", "give one of the two.")
        if each.options:
            yield wrong_value(f"{field}.options", each.options, "a judge has its own", f"move it to {field}.judge.")
        yield from _judge(f"{field}.judge", each.judge)


def _judge(field: str, judge: Judge) -> Iterator[Mistake]:
    yield from _judges_place(field, judge)
    if (judge.prompt is None) == (judge.prompt_file is None):
        both = "both prompt and prompt_file are given"
        reason = both if judge.prompt is not None else "neither prompt nor prompt_file is given"
        yield wrong_value(f"{field}.prompt", judge.prompt, reason, "give one of the two.")
    if judge.scale is not None and judge.scale[0] == judge.scale[1]:
        yield wrong_value(f"{field}.scale", judge.scale, "both ends are the same number", "give two numbers.")
    for name in OF_REQUEST:
        if name in judge.options:
            reason = "this field of a request is not an option"
            yield wrong_value(f"{field}.options.{name}", judge.options[name], reason, "leave it out.")


def _judges_place(field: str, judge: Judge) -> Iterator[Mistake]:
    """A judge is behind a URL, where requests name a model, or in a pool, which has one model."""
    if judge.pool is None:
        if judge.url is None:
            yield wrong_value(f"{field}.url", judge.url, "neither url nor pool is given", "give one of the two.")
        elif judge.model is None:
            yield wrong_value(f"{field}.model", judge.model, "requests to a URL name a model", "give its name there.")
        return
    reasons = {
        "url": "a pool is given too",
        "model": "the pool has its model",
        "api_key": "requests to a pool have the token of the deployment",
    }
    for name, reason in reasons.items():
        if (value := getattr(judge, name)) is not None:
            yield wrong_value(f"{field}.{name}", value, reason, "leave it out, or leave out pool.")
