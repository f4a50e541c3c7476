"""Where network namespaces cannot be made, these tests are skipped, and say why."""

import pytest

from tests.hosts.network import why_not


@pytest.fixture(autouse=True, scope="session")
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
