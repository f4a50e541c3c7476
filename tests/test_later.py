"""A module that tests import when they use it."""

import json

import pytest

from tests.later import Later


def test_what_pytest_asks_a_file_for_imports_nothing() -> None:
    for name in ("__test__", "__wrapped__", "_mock_name"):
        assert getattr(Later("no_such_module"), name, None) is None


def test_a_name_is_that_of_the_module() -> None:
    assert Later("json").loads is json.loads
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        Later("no_such_module").loads  # noqa: B018
