"""Identities of jobs, prompts, leases, members and versions, as types instead of bare strings and numbers."""

import secrets
from enum import StrEnum
from typing import NewType

JobId = NewType("JobId", str)
"""`job-` and twelve hex digits."""

PromptId = NewType("PromptId", str)
"""One row of the data, unique within a job: `<pass>-<row>` in one pass over the training data, `e<version>-<row>` in
the evaluation of one weight version."""


class Purpose(StrEnum):
    """What a prompt was issued for: Purpose of proto/millrace/v1/common.proto. Each has its own queue and ledger."""

    TRAIN = "train"
    """A row of the training data: trained once or dropped with a reason."""
    EVALUATION = "evaluation"
    """A row of the held-out data: scored, never trained."""


LeaseId = NewType("LeaseId", str)
"""The queue entry that a lease claims; unique within a job and purpose. A lease is valid only with its fence."""

MemberId = NewType("MemberId", str)
"""`rollout-` or `trainer-` and eight hex digits: one life of one process; a restarted process is a new member."""

PublicationId = NewType("PublicationId", str)
"""`<job>/<version>/<epoch>/<attempt>`."""

Version = NewType("Version", int)
"""Weight version: 0 is what was loaded, +1 per publication."""

Epoch = NewType("Epoch", int)
"""Membership epoch of the weight communicators. It grows whenever a member joins, leaves or dies."""

Fence = NewType("Fence", int)
"""Fencing token of a lease. It grows each time the prompt is claimed."""


def training_prompt(turn: int, row: int) -> PromptId:
    """The prompt of a row in pass `turn` over the training data."""
    return PromptId(f"{turn}-{row}")


def evaluation_prompt(version: Version, row: int) -> PromptId:
    """The prompt of a row of the held-out data, for a weight version."""
    return PromptId(f"e{version}-{row}")


def pass_of(prompt_id: str) -> int:
    """The pass over the training data that the prompt is from, counted from 0. Raises ValueError for another id."""
    return int(prompt_id.partition("-")[0])


def row_of(prompt_id: str) -> int:
    """Index of the prompt's row in its data. Raises ValueError for what is no prompt id."""
    return int(prompt_id.rpartition("-")[2])


def new_job_id() -> JobId:
    return JobId(f"job-{secrets.token_hex(6)}")


def new_member_id(kind: str) -> MemberId:
    return MemberId(f"{kind}-{secrets.token_hex(4)}")
