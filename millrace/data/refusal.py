"""How this package refuses what a job names."""

import json
from typing import Any

from millrace.errors import InvalidJob


def refused(field: str, value: Any, reason: str, mend: str) -> InvalidJob:
    return InvalidJob(f"{field}: {json.dumps(value, default=str)} will not do: {reason}.", mend)
