"""The model, the prompts that it answers, and how its answers are scored."""

from typing import Any, Literal

from pydantic import Field

from millrace.rewards import PoolTerm, Scope, Term, choose
from millrace.spec.lora import Lora
from millrace.spec.pool import Judge, JudgeTerm
from millrace.validation import limits
from millrace.validation.fields import StrictModel

ColumnRole = Literal["prompt", "ground_truth", "data_source", "extra_info", "ability", "reward_style", "images"]
"""What a column of a data file can be."""
PromptFormat = Literal["auto", "chat", "text"]


class Model(StrictModel):
    path: str
    """Absolute path of a Hugging Face model folder: config, tokenizer and safetensors. The same for every service. Or
    the name of a model on the Hugging Face hub, `owner/name` or `owner/name@revision`: it is pinned to a commit when
    the job is submitted, and each host downloads it into its cache, with the HF_TOKEN of its environment.
    Weights in DeepSeek's FP8 format are read as the unquantized weights that they stand for; what is trained, published
    and written is not quantized. Other quantized weights are refused."""
    weights: str | None = Field(None, examples=["/data/deepseek-v3-dist-ckpt"])
    """Absolute path of a distributed checkpoint with the weights, if they are not safetensors in `path`: one of
    Megatron-Core (torch_dist format), or of torch (DCP) with the names of the Hugging Face module. Each rank of the
    trainer reads its own part. null: the weights are in `path`, as safetensors or as such a checkpoint."""
    trust_remote_code: bool = False
    """Whether Python code in the model folder may run."""
    use_shm: bool = False
    """Whether the trainer's ranks read a copy of the folder in the shared memory of their host (/dev/shm). It is made
    once for all of them, and removed when the last one no longer has the job. Faster if the folder is on a slow disk
    and read again, by restarted ranks or by several jobs."""
    lora: Lora | None = Field(None, examples=[{"rank": 32, "alpha": 32}])
    """Train adapters (LoRA) and leave the model's weights as they are. null: all weights are trained."""

    @property
    def publishes_adapter(self) -> bool:
        """Whether replicas get the model's own weights once, and the adapter alone with each version."""
        return self.lora is not None and not self.lora.merge


class Images(StrictModel):
    max_per_prompt: int = Field(4, ge=1, le=64)
    """Most images of one prompt. A row with more is dropped as `bad_row`."""
    max_pixels: int = Field(4_000_000, ge=1, le=100_000_000)
    """Most pixels of one image, width times height, as it is in the file. A prompt with a larger one is dropped as
    `bad_prompt`. The model's own processor may then make it smaller."""


class Data(StrictModel):
    files: list[str] = Field(default_factory=list, examples=[["/data/train.parquet"]])
    """Absolute paths of Parquet or JSON files (.parquet, .jsonl, .json, the last two also with .gz or .zst), or of
    files of data sets on the hub, `hf://datasets/owner/name/file` or `hf://datasets/owner/name@revision/file`. A path
    may be a pattern, as `/data/train-*.parquet`: the files that match when the job is submitted are stored with it.
    docs/data.md says how rows may look."""
    columns: dict[ColumnRole, str] = Field(
        default_factory=dict, examples=[{"prompt": "question", "ground_truth": "result.answer"}]
    )
    """Which column of the files is what, if the names do not say it: prompt, ground_truth, data_source, extra_info,
    ability, reward_style, images. `a.b` is field b in column a. Columns of verl, TRL and OpenAI are found by
    themselves."""
    prompt_format: PromptFormat = "auto"
    """How prompts go to the model. auto: messages by its chat template, plain text as it is. chat: plain text too, as
    the message of a user. text: no chat template; the texts of several messages are joined by an empty line."""
    procedural: str | None = None
    """`reasoning_gym:<task>` instead of files: prompts are generated."""
    procedural_options: dict[str, Any] = Field(default_factory=dict, examples=[{"size": 1000}])
    """Options of the task, and of the source: `size` (number of rows, default 1000), `seed` (default 0) and
    `system_prompt` (null: no system prompt)."""
    shuffle: bool = True
    """Whether each pass over the data has a new random order, drawn from `seed`."""
    seed: int = Field(0, ge=0, le=limits.LARGEST_SEED)
    """Seed of that order."""
    max_prompt_tokens: int = Field(1024, ge=1, le=limits.MOST_TOKENS)
    """Longest prompt, in tokens, with its chat template."""
    overlong_prompts: Literal["drop", "truncate_left", "truncate_right", "truncate_middle"] = "drop"
    """What happens to a prompt longer than `max_prompt_tokens`: it is dropped and counted in the ledger, or cut at its
    beginning, at its end or in the middle."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict, examples=[{"enable_thinking": False}])
    """Arguments of the tokenizer's chat template: enable_thinking, tools, ..."""
    images: Images | None = Field(None, examples=[{"max_per_prompt": 2}])
    """Prompts may have images, within these limits. null: a row with images cannot be used. docs/data.md says how rows
    name their images."""


class RewardFunction(StrictModel):
    """One of several functions of a reward, a judge, or a reward model that a pool serves."""

    function: str | None = None
    """The function, as in `reward.function`."""
    judge: Judge | None = Field(None, examples=[{"url": "http://10.0.0.5:8000/v1", "model": "judge"}])
    """A language model that scores answers, instead of a function."""
    pool: str | None = Field(None, examples=["quality"])
    """Name of one of `pools` instead of a function: the score is the number that its model gives to prompt and
    answer."""
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$", examples=["format"])
    """Name of its score, in metrics, in samples and in `reward.parts`."""
    weight: float = Field(1.0, ge=-limits.LARGEST_WEIGHT, le=limits.LARGEST_WEIGHT)
    """Factor of its score in the sum; 0: it is only reported."""
    scope: Scope = "answer"
    """What one call scores, as in `reward.scope`."""
    options: dict[str, Any] = Field(default_factory=dict, examples=[{"pattern": "<answer>.*</answer>"}])
    """Keyword arguments of the function."""


class Reward(StrictModel):
    function: str = "auto"
    """math, code, exact, regex, format, reasoning_gym, by_data_source, or a function of your own: `module:function` or
    `/path/to/file.py:function` with verl's signature compute_score(data_source, solution_str, ground_truth,
    extra_info). auto: reasoning_gym for a procedural source, otherwise chosen by the row's reward_model.style: math for
    the style rule."""
    scope: Scope = "answer"
    """What one call scores. answer: one answer. group: all answers to a prompt, with verl's batch signature
    compute_score(data_sources, solution_strs, ground_truths, extra_infos); it returns a list of scores, one for each
    answer. Built-in rewards score one answer. Limits hold for a call, and a failure of a call costs its group."""
    options: dict[str, Any] = Field(default_factory=dict, examples=[{"require_boxed": True}])
    """Keyword arguments of the function."""
    functions: list[RewardFunction] = Field(
        default_factory=list, max_length=16, examples=[[{"function": "math", "name": "right"}]]
    )
    """Several functions instead of `function`, `scope` and `options`. The reward is the sum of their scores, each times
    its weight. Each function scores every answer; the limits hold for each call."""
    parts: list[str] = Field(default_factory=list, max_length=64, examples=[["score", "format"]])
    """Names of further numbers that the function returns with its score, for advantages that normalise several rewards
    separately (`gdpo`). `score` names the score itself, the `name` of one of `functions` its score."""
    timeout_s: float = Field(30.0, ge=0.01, le=limits.LONGEST_S)
    """Longest time for one call, seconds. A call that takes longer is killed, and its group is dropped."""
    memory_mb: int = Field(2048, ge=64, le=4_000_000)
    """Memory of one scoring process and of all that it starts, MB, with the files that they write to /tmp, in addition
    to what Python itself takes."""
    max_failed_fraction: float = Field(0.5, ge=0.0, le=1.0)
    """Largest part of the training prompts that may be dropped because reward or environment failed on one of their
    answers. A job with more, of at least 32 prompts and twice `prompts_per_step`, fails. 1: no limit."""
    workers: int = Field(2, ge=1, le=256)
    """Scoring processes in each replica."""
    network: bool = False
    """Whether the function may use the network, for a reward server. If not, scoring processes run without network
    if the kernel supports that; `isolation` says what happens if it does not."""
    isolation: Literal["auto", "required"] = "auto"
    """How far scoring processes are separated from the replica: its processes, files, network and user. auto: as far as
    the replica's machine allows; the replica's log and `millrace doctor` say what is missing. required: a replica whose
    machine does not allow all of it refuses the job, and `millrace validate` does not call the function on such a
    machine."""

    def terms(self, *, procedural: bool, style: str = "rule", data_source: str | None = None) -> list[Term]:
        """The functions, `auto` settled for a source of data and a row's `reward_model.style`; not what is asked of
        others. Raises InvalidJob, also if a function cannot score rows of `data_source`."""
        row: dict[str, Any] = {"procedural": procedural, "style": style, "data_source": data_source}
        if not self.functions:
            return [Term(choose(self.function, **row), self.options, self.scope)]
        return [
            Term(
                choose(each.function, **row, field=f"reward.functions.{number}"),
                each.options,
                each.scope,
                each.weight,
                each.name,
                f"reward.functions.{number}",
            )
            for number, each in enumerate(self.functions)
            if each.function is not None
        ]

    @property
    def judge_terms(self) -> list[JudgeTerm]:
        """What judges score."""
        return [
            JudgeTerm(each.judge, each.name, each.weight, each.scope, f"reward.functions.{number}.judge")
            for number, each in enumerate(self.functions)
            if each.judge is not None
        ]

    @property
    def pool_terms(self) -> list[PoolTerm]:
        """What pools score."""
        return [PoolTerm(each.pool, each.name, each.weight) for each in self.functions if each.pool is not None]

    @property
    def reported(self) -> list[str]:
        """Names of the separate rewards that steps report: of the functions, and those of `parts`."""
        named = [each.name for each in self.functions]
        return list(dict.fromkeys([*named, *(part for part in self.parts if part != "score")]))


class Evaluation(StrictModel):
    files: list[str] = Field(default_factory=list, examples=[["/data/held_out.parquet"]])
    """Files with the held-out prompts, as in `data.files`. `data.prompt_format` holds for them too."""
    columns: dict[ColumnRole, str] | None = Field(None, examples=[{"prompt": "question"}])
    """Which column of these files is what, as in `data.columns`; null: as there."""
    procedural: str | None = None
    """A procedural source instead of files, as in `data.procedural`."""
    procedural_options: dict[str, Any] = Field(default_factory=dict, examples=[{"size": 256}])
    """Options of that source, as in `data.procedural_options`."""
    every_steps: int = Field(0, ge=0, le=limits.MOST_STEPS)
    """Steps between two evaluations; 0: only before the first step and after the last."""
    prompts: int = Field(256, ge=1, le=limits.MOST_IN_FLIGHT)
    """Largest number of held-out prompts; the first ones are taken."""
    samples_per_prompt: int = Field(1, ge=1, le=limits.MOST_SAMPLES)
    """Answers to each prompt."""
    temperature: float = Field(0.0, ge=0.0, le=limits.HIGHEST_TEMPERATURE)
    """Sampling temperature; 0: greedy."""
