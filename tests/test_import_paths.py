"""Programs outside of this repository import these names from these modules. A move changes an interface: it needs an
entry in CHANGELOG.md."""

import importlib

import pytest

PATHS = (
    "millrace.client:Client",
    "millrace.demo.tokenizer:byte_tokenizer",
    "millrace.errors:MillraceError",
    "millrace.errors:Unavailable",
    "millrace.local.options:StackOptions",
    "millrace.local.ports:free_port",
    "millrace.local.stack:Stack",
    "millrace.rl.registry.options:Fraction",
    "millrace.spec:load",
)


@pytest.mark.parametrize("path", PATHS)
def test_the_name_is_where_programs_import_it(path: str) -> None:
    module, _, name = path.partition(":")
    assert hasattr(importlib.import_module(module), name)
