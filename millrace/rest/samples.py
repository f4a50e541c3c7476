"""Samples as people look at them: groups, the images of their prompts, their tokens."""

import json
from math import isfinite
from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainSerializer

Figure = Annotated[
    float, PlainSerializer(lambda value: value if isfinite(value) else json.dumps(value), float | str, when_used="json")
]
"""A number that may be infinite or NaN. JSON has no such numbers: there it is the text "Infinity", "-Infinity" or
"NaN"."""


class ImageView(BaseModel):
    """One image of a prompt. `GET /v1/jobs/{job_id}/prompts/{prompt_id}/images/{number}` answers its file."""

    media_type: str = Field(
        description="image/png, image/jpeg, image/webp or image/gif, by the file's first bytes; empty for a file of"
        " another kind, which the page does not show."
    )
    width: int | None = Field(description="Pixels, as the file says; null if it does not.")
    height: int | None = Field(description="Pixels, as `width`.")
    bytes: int = Field(description="Size of the file.")
    sha256: str = Field(description="Hash of the file, in hexadecimal digits.")


class TurnView(BaseModel):
    """One answer of the policy within a response, and what it was given before."""

    given: str = Field(description="What followed the turn before: the result of a tool, or what a user said.")
    given_tokens: int
    answer: str
    sampled_tokens: int
    reward: float = Field(description="What the turn itself earned.")
    stop_reason: str = Field(description="What ended the turn: end_of_turn, stop_string or length.")
    versions: list[int] = Field(description="Weight versions of the turn's tokens, oldest first.")


class SampleView(BaseModel):
    """One trajectory as people look at it: the prompt, the answer and its reward."""

    step: int
    prompt_id: str
    purpose: str = Field(description="train or evaluation")
    prompt: str
    question: str = Field(
        "", description="The last message of the user in the prompt; empty for plain text and in older samples."
    )
    answer: str
    ground_truth: Any
    reward: float | None
    reward_failure: str | None = Field(description="Why there is no reward.")
    stop_reason: str = Field(description="What ended the answer: end_of_turn, stop_string or length.")
    tokens: int = Field(description="Tokens of the answer; of several turns, sampled and given.")
    versions: list[int] = Field(description="Weight versions of the answer's tokens, oldest first.")
    member: str = Field(description="Id of the replica that generated the answer.")
    sampled_tokens: int | None = Field(None, description="Tokens that the policy sampled; null in older samples.")
    episode: int = Field(0, description="The prompt's episode that the trajectory belongs to, counted from 0.")
    turns: list[TurnView] = Field([], description="The turns; none if the answer is one turn.")
    data_source: str = Field("", description="`data_source` of the prompt's row; empty in older samples.")
    details: dict[str, Any] = Field({}, description="What the reward function returned besides the score.")
    record: str = Field("", description="Names the record of the group's tokens; empty if none was kept.")
    metadata: dict[str, Any] = Field({}, description="What else the environment said of the trajectory.")
    advantage: float | None = Field(
        None,
        description="Mean over the sampled tokens of the advantage that the policy loss read; null if the trainer"
        " reported none.",
    )
    images: list[ImageView] = Field([], description="The prompt's images, in the order of their places in it.")
    image_mark: str = Field(
        "", description="What stands in `prompt` for each image; empty without images and in older samples."
    )


class GroupView(BaseModel):
    """The samples of one prompt in one step."""

    step: int
    prompt_id: str
    purpose: str = Field(description="train or evaluation")
    data_source: str
    samples: list[SampleView] = Field(description="One for each trajectory, in order.")


class GroupPage(BaseModel):
    """One page of groups, the newest first."""

    groups: list[GroupView]
    next: int | None = Field(
        description="`cursor` of the page that follows; null on the last page. A page with a filter may be short: only"
        " so many samples are looked at for one page."
    )
    total: int = Field(description="Number of trajectories that the job keeps.")


class TokensView(BaseModel):
    """The tokens of one trajectory: the prompt's, then those of the response, sampled and given."""

    prompt_tokens: int = Field(description="How many of the tokens are the prompt's.")
    ids: list[int]
    texts: list[str] | None = Field(
        description="Text of each token; null if the coordinator's host does not have the tokenizer. A character of"
        " several tokens is the text of the last of them."
    )
    logprobs: list[Figure | None] = Field(
        description="Log-probability of each sampled token under the engine, nats; null: given."
    )
    versions: list[int | None] = Field(description="Weight version that sampled each token; null: given.")
    trainer_logprobs: list[Figure | None] = Field(
        [],
        description="Log-probability of each sampled token under the weights that its step began with, nats, as the"
        " losses read them; null: given. Empty if the trainer reported none.",
    )
    advantages: list[Figure | None] = Field(
        [],
        description="Advantage of each sampled token, as the policy loss read it; null: given. Empty if the trainer"
        " reported none.",
    )
