"""How answers are generated."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from millrace.engines import ENGINES, FIELD
from millrace.errors import wrong_value
from millrace.spec.environment import Agent, Environment
from millrace.validation import limits
from millrace.validation.fields import StrictModel
from millrace.validation.mistakes import InvalidValue, in_one_line

CachePolicy = Literal["recompute", "keep"]


class Rollout(StrictModel):
    samples_per_prompt: int = Field(8, ge=1, le=limits.MOST_SAMPLES)
    """Answers to each prompt: the size of a group."""
    min_samples: int | None = Field(None, ge=1, le=limits.MOST_SAMPLES)
    """Answers or episodes with which a group is complete: as soon as this number has ended, the others are cancelled.
    Failed episodes are left out as long as this number remains. It favours what ends early. null:
    samples_per_prompt."""
    max_response_tokens: int = Field(1024, ge=1, le=limits.MOST_TOKENS)
    """Longest answer, in tokens. A longer one is cut. With an environment or an agent: all tokens of a
    trajectory after its prompt, sampled and given."""
    temperature: float = Field(1.0, ge=limits.LOWEST_TEMPERATURE, le=limits.HIGHEST_TEMPERATURE)
    """Temperature of sampling, and of the log-probabilities that are trained on."""
    top_p: float = Field(1.0, ge=0.001, le=1.0)
    """Nucleus sampling; 1 keeps every token."""
    top_k: int = Field(0, ge=0, le=1_000_000)
    """Number of most probable tokens to sample from; 0 keeps every token."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, max_length=64, examples=[["</answer>"]]
    )
    """Strings that end an answer, in addition to the tokenizer's end-of-turn tokens."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Data type of the engine's parameters, and so of the published weights."""
    cache_policy: CachePolicy = "recompute"
    """What happens to running requests when new weights arrive. recompute: their keys and values are computed again
    with the new weights, so that every log-probability is the new model's. keep: they are kept, which is faster and
    slightly off-policy."""
    lease_s: float = Field(60.0, ge=limits.SHORTEST_S, le=limits.LONGEST_S)
    """Seconds after which a replica loses a lease that it did not extend."""
    environment: Environment | None = Field(None, examples=[{"name": "/data/environments/game.py:Game"}])
    """What the policy talks to, for episodes of several turns: docs/environments.md. Plain text is the name alone.
    null: an episode is one answer to the prompt."""
    agent: Agent | None = Field(None, examples=["external"])
    """The program that plays the episodes and asks the policy over HTTP: docs/agents.md. `external` alone: agents that
    run elsewhere. null: no agent."""
    engine_options: dict[str, Any] = Field(default_factory=dict, examples=[{"max_num_seqs": 256}])
    """Options of the engine, which checks them: vLLM's AsyncEngineArgs, SGLang's ServerArgs. Options under an engine's
    name are for replicas with that engine only: docs/engines.md."""

    @property
    def smallest_group(self) -> int:
        """Episodes that a group has at least."""
        return self.samples_per_prompt if self.min_samples is None else self.min_samples

    def options_of(self, engine: str) -> dict[str, Any]:
        """The engine options for a replica with `engine`: the shared ones, and over them those under its name."""
        shared = {name: value for name, value in self.engine_options.items() if name not in ENGINES}
        return shared | (self.engine_options.get(engine) or {})

    def field_of(self, engine: str, option: str) -> str:
        """The path of an option of `engine` in the job spec: under the engine's name if it stands there."""
        return (
            f"{FIELD}.{engine}.{option}" if option in (self.engine_options.get(engine) or {}) else f"{FIELD}.{option}"
        )

    @field_validator("engine_options")
    @classmethod
    def _of_engines(cls, value: dict[str, Any]) -> dict[str, Any]:
        for engine, descriptor in ENGINES.items():
            if not isinstance(value.get(engine, {}), dict):
                example = in_one_line({engine: descriptor.options_example})
                fix, field = f"give a mapping, for example `{example}`, or leave it out.", f"{FIELD}.{engine}"
                raise InvalidValue(wrong_value(field, value[engine], f"is not a mapping of {engine}'s options", fix))
        return value
