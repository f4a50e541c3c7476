"""Pools: replicas that score with a model of their own, beside those that generate."""

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from millrace.validation import limits
from millrace.validation.fields import StrictModel

ROLLOUT = "rollout"
"""The pool of the replicas that generate. It is not declared."""
NAME = r"^[a-z][a-z0-9_-]*$"
LONGEST_NAME = 64


class PoolTask(StrEnum):
    """What the replicas of a pool compute."""

    REWARDS = "rewards"
    """One number for a conversation, by a sequence-classification head."""
    LOGPROBS = "log-probabilities"
    """Log-probabilities of given tokens, by a language model."""
    REPLIES = "replies"
    """Replies to conversations, by a language model: those of a judge."""


class Pool(StrictModel):
    """Replicas that are started with `--pool NAME`. They load their model from `path` once, get neither prompts nor new
    weights, and score what the other replicas generate."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME, pattern=NAME, examples=["teacher"])
    """Name that replicas are started with, and by which the job refers to the pool: small letters, digits, `_`, `-`."""
    path: str
    """Hugging Face folder of the model, as `model.path`, with its weights. A reward model is a sequence-classification
    model with one label; a teacher is a language model with the policy's tokenizer; a judge is a language model with a
    chat template."""
    trust_remote_code: bool = False
    """Whether Python code in that folder may run."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Data type of the model's parameters."""
    batch_tokens: int = Field(8192, ge=1, le=limits.MOST_TOKENS)
    """Most tokens of one request and of one pass through the model, padding included. A longer sequence goes alone. It
    does not hold for a judge."""
    timeout_s: float = Field(300.0, ge=limits.SHORTEST_S, le=limits.LONGEST_S)
    """Longest time for one request, seconds. After that it goes to another replica of the pool."""
    engine_options: dict[str, Any] = Field(default_factory=dict, examples=[{"attn_implementation": "sdpa"}])
    """Options of the engine, which checks them, as `rollout.engine_options`."""
