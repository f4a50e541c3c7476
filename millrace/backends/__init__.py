"""The training backends: one file each with what is known of it without importing it."""

from collections.abc import Mapping
from typing import Any

from millrace.descriptors import BackendDescriptor, read

BACKENDS: Mapping[str, BackendDescriptor[Any]] = read(__name__, __path__)
BACKEND_NAMES = tuple(BACKENDS)
FIELD = "trainer.backend_options"
