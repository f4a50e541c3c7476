"""Which model, and which data it is asked."""

from typing import Any, Literal

from pydantic import Field

from millrace.validation.model import StrictModel


class Model(StrictModel):
    path: str
    """Whole path of a Hugging Face model folder: config, tokenizer and safetensors. The same for every service."""
    trust_remote_code: bool = False
    """Run Python code that the model folder brings."""


class Data(StrictModel):
    files: list[str] = Field(default_factory=list, examples=[["/data/train.parquet"]])
    """Whole paths of Parquet or JSONL files in verl's columns: data_source, prompt, reward_model{style, ground_truth},
    extra_info."""
    procedural: str | None = None
    """`reasoning_gym:<task>` instead of files."""
    procedural_options: dict[str, Any] = Field(default_factory=dict, examples=[{"size": 1000}])
    """The task's own options, and the source's `size` (rows, 1000), `seed` (0) and `system_prompt` (null for none)."""
    shuffle: bool = True
    """A new order in each pass, drawn from `seed`."""
    seed: int = Field(0, ge=0)
    """Of that order."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Of a prompt in its chat template."""
    overlong_prompts: Literal["drop", "truncate_left", "truncate_right", "truncate_middle"] = "drop"
    """What becomes of a prompt longer than `max_prompt_tokens`: dropped on the ledger, or cut."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict, examples=[{"enable_thinking": False}])
    """Passed to the tokenizer's chat template: enable_thinking, tools, ..."""


class Reward(StrictModel):
    function: str = "auto"
    """math, exact, regex, format, reasoning_gym, or your own: `module:function` or `/path/to/file.py:function` with
    verl's signature compute_score(data_source, solution_str, ground_truth, extra_info). auto: reasoning_gym for a
    procedural source, otherwise by the row's reward_model.style: rule means math."""
    options: dict[str, Any] = Field(default_factory=dict, examples=[{"require_boxed": True}])
    """Keyword arguments for the function."""
    parts: list[str] = Field(default_factory=list, examples=[["score", "format"]])
    """Names of numbers that the function returns beside its score, for advantages that normalise several rewards apart
    (`gdpo`); `score` is the score itself."""
    timeout_s: float = Field(30.0, gt=0)
    """For one call. A call that takes longer is killed and costs its group."""
    memory_mb: int = Field(2048, ge=64)
    """Address space of one scoring process, over what Python itself takes."""
    workers: int = Field(2, ge=1, le=256)
    """Scoring processes beside each engine."""
    network: bool = False
    """Whether the function may reach the network (a reward server). If not, it is kept off it where the kernel
    allows that; otherwise the replica warns."""


class Evaluation(StrictModel):
    files: list[str] = Field(default_factory=list, examples=[["/data/train.parquet"]])
    """As `data.files`."""
    procedural: str | None = None
    """As `data.procedural`."""
    procedural_options: dict[str, Any] = Field(default_factory=dict, examples=[{"size": 1000}])
    """As `data.procedural_options`."""
    every_steps: int = Field(0, ge=0)
    """0: only before the first and after the last step."""
    prompts: int = Field(256, ge=1)
    """At most so many held-out prompts, the first ones."""
    samples_per_prompt: int = Field(1, ge=1)
    """Answers to each."""
    temperature: float = Field(0.0, ge=0.0)
    """0 is greedy."""
