"""How trajectories are generated."""

from typing import Any, Literal

from pydantic import Field, field_validator

from millrace.engines import ENGINES, FIELD
from millrace.errors import wrong_value
from millrace.validation.mistakes import InvalidValue, in_one_line
from millrace.validation.model import StrictModel

CachePolicy = Literal["recompute", "keep"]


class Rollout(StrictModel):
    samples_per_prompt: int = Field(8, ge=1)
    """Size of a group."""
    max_response_tokens: int = Field(1024, ge=1)
    """A longer one is cut."""
    temperature: float = Field(1.0, gt=0.0)
    """Of sampling, and of the log-probabilities that are trained on."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """1 keeps every token."""
    top_k: int = Field(0, ge=0)
    """0 keeps every token."""
    stop: list[str] = Field(default_factory=list, examples=[["</answer>"]])
    """Strings that end a response, beside the tokenizer's end-of-turn tokens."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Of the engine's parameters, and so of what is published."""
    cache_policy: CachePolicy = "recompute"
    """What becomes of requests in flight when new weights come: recompute their keys and values under the new weights,
    so that every log-probability is the new model's; or keep them, which is faster and slightly off-policy."""
    lease_s: float = Field(60.0, gt=0)
    """A replica that does not extend a lease for so long loses it."""
    engine_options: dict[str, Any] = Field(default_factory=dict, examples=[{"max_num_seqs": 256}])
    """Passed to the engine as they are: vLLM's AsyncEngineArgs, SGLang's ServerArgs. The engine checks them. Those
    under an engine's name are for replicas with that engine alone: docs/engines.md."""

    def options_of(self, engine: str) -> dict[str, Any]:
        """The engine_options for a replica with `engine`."""
        shared = {name: value for name, value in self.engine_options.items() if name not in ENGINES}
        return shared | (self.engine_options.get(engine) or {})

    @field_validator("engine_options")
    @classmethod
    def _of_engines(cls, value: dict[str, Any]) -> dict[str, Any]:
        for engine, descriptor in ENGINES.items():
            if not isinstance(value.get(engine, {}), dict):
                example = in_one_line({engine: descriptor.options_example})
                fix, field = f"give a mapping, for example `{example}`, or leave it out.", f"{FIELD}.{engine}"
                raise InvalidValue(wrong_value(field, value[engine], f"is not a mapping of {engine}'s options", fix))
        return value
