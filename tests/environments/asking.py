"""Requests to an environment in the test's own process."""

import asyncio
from typing import Any

from services.rollout.environments.host import Host


def ask(host: Host, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request of the only episode."""
    return asyncio.run(host.answer({"episode": 1, **request}))
