"""Environments that have a name instead of a class, each with the options that it takes.

Adding one: its options here, and how it is opened in services/rollout/episodes/opening.py.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from millrace.errors import InvalidJob
from millrace.validation.mistakes import explain
from millrace.validation.model import StrictModel

FIELD = "rollout.environment.options"


class Tools(StrictModel):
    """No environment beside the tools of `mcp`: the policy calls them until it answers, and the reward function scores
    the answer."""


TOOLS = "tools"
BUILT_IN: dict[str, type[StrictModel]] = {TOOLS: Tools}


def options_of(name: str, given: Mapping[str, Any]) -> StrictModel:
    """The options of the built-in environment `name`. Raises InvalidJob."""
    model = BUILT_IN[name]
    try:
        return model(**given)
    except ValidationError as error:
        raise InvalidJob.of(explain(error.errors(), model, FIELD)) from error
