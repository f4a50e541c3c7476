"""How trajectories are generated."""

from typing import Any, Literal

from pydantic import Field

from millrace.spec.base import Part

CachePolicy = Literal["recompute", "keep"]


class Rollout(Part):
    samples_per_prompt: int = Field(8, ge=1)
    """Size of a group."""
    max_response_tokens: int = Field(1024, ge=1)
    temperature: float = Field(1.0, gt=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 keeps every token."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response, beside the tokenizer's end-of-turn tokens."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Of the engine's parameters, and so of what is published."""
    cache_policy: CachePolicy = "recompute"
    """What becomes of requests in flight when new weights come: recompute their keys and values under the new weights,
    so that every log-probability is the new model's; or keep them, which is faster and slightly off-policy."""
    lease_s: float = Field(60.0, gt=0)
    """A replica that does not extend a lease for so long loses it."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the engine as they are: vLLM's AsyncEngineArgs, SGLang's ServerArgs. The engine checks them."""
