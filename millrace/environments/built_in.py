"""Environments that have a name instead of a class, each with the options that it takes.

Adding one: its options here, and how it is opened in services/rollout/work/job.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from millrace.environments.verl import environment as verl
from millrace.errors import InvalidJob, refused
from millrace.validation.fields import StrictModel
from millrace.validation.mistakes import explain

FIELD = verl.FIELD


class Tools(StrictModel):
    """No environment beside the tools of `mcp`: the policy calls them until it answers, and the reward function scores
    the answer."""


class OpenEnv(StrictModel):
    """A server of OpenEnv. Each episode has a session of its own there."""

    url: str = Field(pattern="^https?://", max_length=2048, examples=["http://games:8000"])
    """Address of the server, without `/ws`."""
    action_field: str | None = Field(None, min_length=1, max_length=200, examples=["message"])
    """Field of the action that takes the text of a turn. null: the policy acts by tools. They are those of the server;
    one that has none of its own gets the tool `act`, whose parameters are the fields of its action."""
    action: dict[str, Any] = Field(default_factory=dict, examples=[{"player": 1}])
    """Other fields of every action."""
    observation_field: str | None = Field(None, min_length=1, max_length=200, examples=["text"])
    """Field of the observation that is shown to the policy; null: the whole observation, as JSON."""
    reset: dict[str, Any] = Field(default_factory=dict, examples=[{"difficulty": 3}])
    """Parameters of every reset. A row's `extra_info.reset` is laid over them."""


class Verl(StrictModel):
    """Tools and interactions that were written for verl, from its two YAML files; at least one of them is given.
    Classes are looked for on Python's path and in the folder of the file."""

    tools: str | None = Field(None, pattern="^/", max_length=4096, examples=["/data/verl/tools.yaml"])
    """Absolute path of the file with the tools, verl's `multi_turn.tool_config_path`."""
    interaction: str | None = Field(None, pattern="^/", max_length=4096, examples=["/data/verl/interaction.yaml"])
    """Absolute path of the file with the interactions, verl's `multi_turn.interaction_config_path`. null: a turn that
    calls no tool ends the episode."""
    rewards: Literal["function", "tools"] = "function"
    """function: the reward function scores the last turn, as in verl. tools: an episode earns what `execute`,
    `calc_reward` and `generate_response` return, added up."""

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the files."""
        return tuple({str(Path(each).parent) for each in (self.tools, self.interaction) if each is not None})

    def check(self) -> None:
        """Reads the files. Raises InvalidJob."""
        if self.tools is None and self.interaction is None:
            fix = "give the path of verl's tool_config_path, interaction_config_path or both."
            raise refused(f"{FIELD}.tools", None, "neither tools nor interaction is given", fix)
        if self.tools is not None:
            verl.read(self.tools, "tools")
        if self.interaction is not None:
            verl.read(self.interaction, "interaction")


class Verifiers(StrictModel):
    """A host of an environment that was written for verifiers (`python -m services.environments serve`)."""

    url: str = Field(pattern="^https?://", max_length=2048, examples=["http://environments:7790"])
    """Address of the host."""
    token_env: str | None = Field(None, pattern="^ENVIRONMENT_[A-Z0-9_]{1,60}$", examples=["ENVIRONMENT_TOKEN"])
    """Environment variable of the replicas that holds the host's token. Its name begins with ENVIRONMENT_."""
    tokenizer: str | None = Field(None, min_length=1, max_length=4096, examples=["/data/models/Qwen3-0.6B"])
    """Folder or name of the tokenizer, as the host finds it; null: model.path."""


TOOLS = "tools"
OPENENV = "openenv"
VERL = "verl"
VERIFIERS = "verifiers"
BUILT_IN: dict[str, type[StrictModel]] = {TOOLS: Tools, OPENENV: OpenEnv, VERL: Verl, VERIFIERS: Verifiers}


def options_of(name: str, given: Mapping[str, Any]) -> StrictModel:
    """The options of the built-in environment `name`. Raises InvalidJob."""
    model = BUILT_IN[name]
    try:
        return model(**given)
    except ValidationError as error:
        raise InvalidJob.of(explain(error.errors(), model, FIELD)) from error
