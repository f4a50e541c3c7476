"""What the fields of requests may hold, beyond their types: checked for every call before its handler."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from google.protobuf.message import Message

from millrace.errors import bad_field

LONGEST_TEXT = 4096
LONGEST_S = 30 * 86_400.0
DTYPES = ("float32", "float16", "bfloat16")
MOST_RANKS = 65_536
MOST_SAMPLES = 1_000_000
MOST_HOSTS = 1024
MOST_GPUS = 4096
"""Hosts and GPUs in one heartbeat."""


@dataclass(frozen=True)
class Rule:
    """What a field has to be."""

    holds: Callable[[Any], bool]
    reason: str
    """Why a value that does not hold is refused."""
    fix: str


def _between(low: float, high: float) -> Rule:
    return Rule(
        lambda value: low <= value <= high, f"is not between {low:g} and {high:g}", "send a number in that range."
    )


def _is_path(text: str) -> bool:
    path = PurePosixPath(text)
    return path.is_absolute() and len(path.parts) > 1 and ".." not in path.parts and "\0" not in text


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(re.fullmatch(r"[A-Za-z0-9.:_\[\]-]{1,255}", host)) and port.isdecimal() and 0 < int(port) < 65_536


ID = Rule(
    lambda text: bool(re.fullmatch(r"[\w.-]{1,100}", text, re.ASCII)), "is no id", "send letters, digits and `-`."
)
TEXT = Rule(lambda text: len(text) <= LONGEST_TEXT, f"has more than {LONGEST_TEXT} characters", "send a shorter text.")
NAME = Rule(
    lambda text: bool(re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", text)),
    "is no name",
    "use small letters, digits, _ and -, at most 64.",
)
SECONDS = _between(0, LONGEST_S)
DEADLINE = _between(0.001, LONGEST_S)
PATH = Rule(_is_path, "is not the absolute path of a folder", "send one without `..`.")
ADDRESS = Rule(_is_address, "is not host:port", "send the address at which other hosts reach the service.")
DTYPE = Rule(lambda text: text in DTYPES, "is no dtype of weights", f"send one of {', '.join(DTYPES)}.")
RANKS = _between(0, MOST_RANKS)
SOME = Rule(lambda values: 0 < len(values) <= MOST_SAMPLES, "is empty", "send at least one.")
TOKENS = _between(1, 1 << 30)
EACH_TOKENS = Rule(
    lambda values: 0 < len(values) <= MOST_SAMPLES and min(values) >= 1,
    "has no tokens",
    "send the lengths of all samples.",
)


def _at_most(count: int) -> Rule:
    return Rule(lambda values: len(values) <= count, f"has more than {count} entries", "send fewer.")


RULES: Mapping[str, Rule] = {
    name: rule
    for names, rule in (
        ("job_id member_id prompt_id lease_id generation life", ID),
        (
            "prompt_ids",
            Rule(
                lambda ids: len(ids) <= MOST_SAMPLES and all(map(ID.holds, ids)),
                "holds what is no id",
                "send ids of prompts.",
            ),
        ),
        ("address work_address", ADDRESS),
        ("SaveRequest.path FinishSaveRequest.path LoadRequest.path checkpoint", PATH),
        ("dtype", DTYPE),
        ("wait_s", SECONDS),
        ("deadline_s", DEADLINE),
        ("world_size first_rank node_rank nodes", RANKS),
        ("port metrics_port sessions_port", _between(0, 65_535)),
        ("groups trajectories", SOME),
        ("free_samples StepRequest.part step_groups", _between(0, MOST_SAMPLES)),
        ("prompt_tokens TrajectoryLengths.response_tokens sampled_tokens max_response_tokens", TOKENS),
        ("GroupRef.response_tokens", EACH_TOKENS),
        ("samples", _between(0, 1024)),
        ("temperature", _between(0, 100)),
        ("top_p", _between(0, 1)),
        ("top_k", _between(-1, 1 << 24)),
        (
            "stop",
            Rule(
                lambda texts: len(texts) <= 64 and all(map(TEXT.holds, texts)), "is too long", "send at most 64 texts."
            ),
        ),
        ("message_bytes", _between(0, 1 << 40)),
        ("RegisterRequest.partition", NAME),
        ("TailLogRequest.lines", _between(0, 200)),
        ("CopyStateRequest.receivers MemberUsage.hosts", _at_most(MOST_HOSTS)),
        ("MemberUsage.gpus", _at_most(MOST_GPUS)),
    )
    for name in names.split()
}
"""The rule of a field, by its name or by those of message and field.
Other texts have TEXT's limit, other numbers have to be finite."""
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "StepRequest": ("groups", "work_address"),
    "AddPartRequest": ("part",),
    "GroupRef": ("prompt_id", "prompt_tokens"),
    "TrajectoryLengths": ("prompt_tokens", "response_tokens", "sampled_tokens"),
    "DescribeSendRequest": ("job_id",),
    "PrepareSendRequest": ("publication", "dtype", "deadline_s"),
    "PrepareReceiveRequest": ("publication", "deadline_s"),
    "SaveRequest": ("path",),
    "FinishSaveRequest": ("path",),
    "LoadRequest": ("path",),
    "CopyStateRequest": ("receivers",),
    "ReceiveStateRequest": ("rendezvous",),
    "LeaseRef": ("job_id", "lease_id"),
    "PublicationRef": ("job_id",),
}
"""Fields that a message cannot be without."""
ONE_OF: Mapping[str, tuple[str, str]] = {"GroupRef": ("response_tokens", "trajectories")}
"""Two lists of which a message has exactly one."""
LONG = {"spec", "prompt", "reason", "failure", "service"}
"""Texts that may be longer than others: whoever reads them has a limit of its own."""
ELSEWHERE = {"manifest", "sides", "group", "drop", "checksums", "parts"}
"""Messages that are checked by whoever uses them, and that are large."""


def check(message: Message) -> None:
    """Raises InvalidRequest for the first field of the message, or of a message in it, that breaks its rule."""
    kind = message.DESCRIPTOR.name
    for name in REQUIRED.get(kind, ()):
        field = message.DESCRIPTOR.fields_by_name[name]
        missing = not message.HasField(name) if _is_one_message(field) else not getattr(message, name)
        if missing:
            raise bad_field(name, "", "is missing", RULES[name].fix if name in RULES else "send it.")
    if kind in ONE_OF and sum(1 for name in ONE_OF[kind] if getattr(message, name)) != 1:
        first, second = ONE_OF[kind]
        raise bad_field(first, "", f"is given together with {second}, or both are missing", "send one of them.")
    for field, value in message.ListFields():
        if field.name in ELSEWHERE:
            continue
        if field.message_type is not None:
            for each in [value] if _is_one_message(field) else value:
                check(each)
        rule = RULES.get(f"{kind}.{field.name}") or RULES.get(field.name) or _of_type(field, value)
        if rule is not None and not rule.holds(value):
            shown = value if isinstance(value, str | int | float) else f"{len(value)} values"
            raise bad_field(field.name, shown, rule.reason, rule.fix)


FINITE = Rule(math.isfinite, "is not finite", "send a finite number.")


def _of_type(field: Any, value: Any) -> Rule | None:
    """The rule of fields that have none of their own."""
    if isinstance(value, str):
        return None if field.name in LONG else TEXT
    return FINITE if isinstance(value, float) else None


def _is_one_message(field: Any) -> bool:  # protobuf's descriptors have several types
    return field.message_type is not None and not field.is_repeated
