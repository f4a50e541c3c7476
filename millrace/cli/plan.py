"""`millrace plan`: what a job would need, and how long its steps would take, on GPUs that need not be there."""

from typing import TYPE_CHECKING, Annotated

import typer

from millrace.cli.settings import Settings, SpecFile, Variant, changes_of, known_engine, read
from millrace.terminal.output import AsJson, people, print_json
from millrace.validation.limits import MOST_RANKS, MOST_TOKENS

if TYPE_CHECKING:
    from millrace.planner.search import Request
    from millrace.spec import JobSpec

Published = Annotated[
    str | None,
    typer.Option(help="A published model whose sizes to take instead of the job's folder: qwen3-8b, deepseek-v3."),
]
ImageTokens = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=MOST_TOKENS,
        help="Mean tokens of a prompt's image, in a job with data.images; without it, half of the prompt.",
    ),
]
Colocated = Annotated[
    bool,
    typer.Option(
        "--colocated",
        help="Let trainer and replicas take turns on the trainer's GPUs. Millrace does not run so: for comparison.",
    ),
]
Search = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Propose layouts of the job's backend that fit, the fastest first; without --trainer-gpus, on the "
        "fewest GPUs that any layout fits.",
    ),
]


def plan(
    spec: SpecFile,
    trainer_gpus: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="GPUs of the trainer; without it, the fewest possible.")
    ] = None,
    rollout_gpus: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="GPUs of all replicas; without it, those of one.")
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="h20, h100, h200, a100, b200, or a YAML file with the figures of another GPU.")
    ] = "h100",
    engine: Annotated[str, typer.Option(help="Engine of the replicas.")] = "vllm",
    model: Published = None,
    mean_prompt: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_TOKENS, help="Mean length of prompts; without it, a quarter of the longest."),
    ] = None,
    mean_response: Annotated[
        float | None,
        typer.Option(min=1, max=MOST_TOKENS, help="Mean length of responses; without it, a quarter of the longest."),
    ] = None,
    mean_image_tokens: ImageTokens = None,
    colocated: Colocated = False,
    search: Search = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory, times and cost of a job on GPUs that need not be there.

    Printed are the memory of a GPU by part and of a host, whether the job fits and which settings would make it fit;
    the seconds of generation, training and publication, and what they are spent on; how long each side waits for the
    other, MFU, tokens a second, the price of a million trained tokens, and how many rollout GPUs for each trainer GPU
    would balance both. Every number comes from the formulas of docs/planner.md, with the model's config.json or the
    published sizes of a known model: neither torch nor a GPU is needed.

    For example: millrace plan presets/deepseek-v3-96gpu.yaml --trainer-gpus 96 --rollout-gpus 64 --gpu h20
    """
    from millrace.planner import text
    from millrace.planner.hardware import hardware
    from millrace.planner.plan import Cluster, make_plan
    from millrace.planner.search import Request, model_shape
    from millrace.planner.workload import workload

    figures, (_, job) = hardware(gpu), read(spec, Variant("", changes_of(settings)))
    shape = model_shape(job, model)
    cluster = Cluster(figures, *_gpus(job, engine, trainer_gpus, rollout_gpus), colocated)
    work = workload(job, mean_prompt, mean_response, mean_image_tokens)
    if search:
        return _search(Request(job, shape, cluster, work, engine), trainer_gpus is None, as_json)
    made = make_plan(job, shape, cluster, work, engine)
    if as_json:
        return print_json(text.as_dict(made))
    for line in text.lines(made):
        people().print(line, markup=False)


def _search(request: "Request", smallest: bool, as_json: bool) -> None:
    """Prints the layouts that fit. Raises InvalidJob if none does."""
    from millrace.errors import refused
    from millrace.planner import search, text

    gpus = search.fewest(request) if smallest else request.cluster.trainer_gpus
    found = search.proposals(request.on(gpus)) if gpus else []
    if not found:
        reason = "no layout of this backend fits"
        fix = "leave --trainer-gpus out to find the fewest, lower trainer.token_budget, or give larger GPUs or hosts."
        raise refused("--trainer-gpus", request.cluster.trainer_gpus, reason, fix)
    if as_json:
        return print_json({"trainer_gpus": gpus, "layouts": text.as_list(found)})
    for line in text.found_lines(request.spec, found):
        people().print(line, markup=False)


def _gpus(job: "JobSpec", engine: str, trainer: int | None, rollout: int | None) -> tuple[int, int]:
    """GPUs of trainer and replicas; if they are not given, the fewest that the job's options allow."""
    from millrace.memory.prediction import fewest_ranks

    replica = known_engine(engine).world_size(job.rollout.options_of(engine))
    return trainer or fewest_ranks(job), rollout or replica
