"""A judge: a language model behind an OpenAI-compatible endpoint that scores answers."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from millrace.rewards.term import Scope
from millrace.validation import limits
from millrace.validation.fields import StrictModel

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
    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", examples=["JUDGE_API_KEY"])
    """Name of the environment variable of the replicas that holds the key for `url`. null: none is sent."""
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
