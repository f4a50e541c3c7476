"""Rules about judges and the parts of a reward that they score."""

from collections.abc import Iterator

from millrace.errors import Mistake, wrong_value
from millrace.spec.job import JobSpec
from millrace.spec.judges.judge import Judge

OF_REQUEST = ("model", "messages", "stream", "n")
"""Fields of a request that are not options."""


def broken_rules(spec: JobSpec) -> Iterator[Mistake]:
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
        yield from _of_judge(f"{field}.judge", each.judge)


def _of_judge(field: str, judge: Judge) -> Iterator[Mistake]:
    yield from _place(field, judge)
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


def _place(field: str, judge: Judge) -> Iterator[Mistake]:
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
        "api_key_env": "requests to a pool have the token of the deployment",
    }
    for name, reason in reasons.items():
        if (value := getattr(judge, name)) is not None:
            yield wrong_value(f"{field}.{name}", value, reason, "leave it out, or leave out pool.")
