"""Models that score answers: judges behind an OpenAI-compatible endpoint, and pools, which are replicas with a model of
their own, beside those that generate."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.rewards.term import Scope
from millrace.validation import limits
from millrace.validation.fields import StrictModel
from millrace.validation.secrets import SecretReference

Number = Annotated[float, Field(ge=-limits.LARGEST_NUMBER, le=limits.LARGEST_NUMBER)]
NUMBER = r"(-?\d+(?:\.\d+)?)"


class Judge(StrictModel):
    url: str | None = Field(
        None, pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$", max_length=2000, examples=["http://10.0.0.5:8000/v1"]
    )
    """Base URL of the endpoint: requests go to `<url>/chat/completions`, from every replica."""
    model: str | None = Field(None, min_length=1, max_length=500, examples=["Qwen/Qwen3-32B"])
    """The model that requests to `url` name."""
    pool: str | None = Field(None, examples=["judge"])
    """Name of one of `pools` instead of `url` and `model`: requests go to the replicas of that pool."""
    prompt: str | None = Field(None, max_length=100_000, examples=["Rate this answer.\n{{answer}}\nEnd with Score: N"])
    """Template of the user's message. `{{answer}}`, `{{conversation}}` (all turns of an episode, as the model saw
    them), `{{prompt}}` and `{{ground_truth}}` are replaced; with `scope: group` `{{answers}}` and `{{conversations}}`,
    each after its number."""
    prompt_file: str | None = Field(None, examples=["/data/rewards/judge.txt"])
    """Absolute path of a file with the template instead."""
    system: str = Field("", max_length=100_000)
    """The system message; empty: none."""
    pattern: str = Field(r"(?i)score\W*" + NUMBER, min_length=1, max_length=10_000)
    """Regular expression of a score: the first group of its last match, or the match. With `scope: group` all matches,
    as many as there are answers, in order."""
    json_field: str | None = Field(None, min_length=1, max_length=500, examples=["score"])
    """Name of the score in the last JSON object of the reply that has it, instead of `pattern`. With `scope: group` it
    is a list."""
    scale: list[Number] | None = Field(None, min_length=2, max_length=2, examples=[[1, 10]])
    """The judge's numbers that count as 0 and as 1. Those between lie between, those outside are no score. null:
    numbers are taken as they are."""
    options: dict[str, Any] = Field({"temperature": 0.0}, examples=[{"temperature": 0.0, "max_tokens": 512}])
    """Further fields of each request."""
    api_key: SecretReference | None = Field(None, examples=["env:JUDGE_API_KEY"])
    """The place of the key for `url`, on each replica: `env:NAME` or `file:/path`. null: none is sent."""
    max_concurrent: int = Field(16, ge=1, le=4096)
    """Requests of one replica at a time."""
    timeout_s: float = Field(60.0, ge=limits.SHORTEST_S, le=limits.LONGEST_S)
    """Longest time for one request, seconds."""
    retries: int = Field(2, ge=0, le=100)
    """How often a request is repeated whose reply holds no score."""
    deadline_s: float = Field(600.0, ge=limits.SHORTEST_S, le=limits.LONGEST_S)
    """How long answers wait for a judge that cannot be reached, is overloaded or fails, seconds. Requests are repeated
    meanwhile; after that time the group is dropped."""


@dataclass(frozen=True)
class JudgeTerm:
    """A part of a reward that a judge scores."""

    judge: Judge
    name: str
    """Name of its score beside the reward."""
    weight: float
    """Factor of its score in the reward."""
    scope: Scope
    """What one request scores: one answer, or all answers to a prompt."""
    field: str
    """Path of the judge in the job spec."""


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
