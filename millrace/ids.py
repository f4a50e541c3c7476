"""The identities that the services speak of, as types rather than bare strings and numbers."""

import secrets
from typing import NewType

JobId = NewType("JobId", str)
"""`job-` and twelve hex digits."""

PromptId = NewType("PromptId", str)
"""`<pass>-<row>`: one row of the data in one pass over it; unique within a job."""

LeaseId = NewType("LeaseId", str)
"""The queue entry that a lease is a claim on; unique within a job. A lease is valid only with its fencing token."""

MemberId = NewType("MemberId", str)
"""`rollout-` or `trainer-` and eight hex digits: one life of one process; a restarted process is a new member."""

PublicationId = NewType("PublicationId", str)
"""`<job>/<version>/<epoch>/<attempt>`."""

Version = NewType("Version", int)
"""Weight version: 0 is what was loaded, +1 per publication."""

Epoch = NewType("Epoch", int)
"""Membership epoch of the weight communicators: grows whenever a member joins, leaves or dies."""

Fence = NewType("Fence", int)
"""Fencing token of a lease: grows each time that its prompt is claimed."""


def new_job_id() -> JobId:
    return JobId(f"job-{secrets.token_hex(6)}")


def new_member_id(kind: str) -> MemberId:
    return MemberId(f"{kind}-{secrets.token_hex(4)}")
