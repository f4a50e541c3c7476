"""What a recipe needs: memory of a trainer's GPU, seconds of an update, seconds of the longest answer. By formulas.

Memory is that of `millrace/memory`. The other constants are from BENCHMARKS.md.
"""

from dataclasses import dataclass

from millrace.megatron.architectures.published import PUBLISHED
from millrace.megatron.architectures.shape import active_parameters, sequence_cost
from millrace.memory.adapters import adapter_parameters
from millrace.memory.layers import parameters
from millrace.memory.ledger import GB, peak
from millrace.memory.prediction import predict
from millrace.spec import JobSpec, parse
from recipes.catalogue import Recipe

GPU_FLOPS = 989e12
"""Of an H200 or H100 in bfloat16, without sparsity."""
GPU_BYTES_PER_SECOND = 4.8e12
"""Memory bandwidth of an H200."""
MFU = {("qwen3-1.7b", "fsdp2"): 0.451, ("qwen3-1.7b", "megatron"): 0.486} | {
    ("qwen3-8b", "fsdp2"): 0.485,
    ("qwen3-8b", "megatron"): 0.515,
}
"""Measured on one H200 without recomputation (BENCHMARKS.md, "FSDP2 beside Megatron-Core"). The 0.6B shape was not
measured: it gets the values of 1.7B, which are too good for it. Nor was Qwen2.5-VL: it gets those of 8B."""
LIKE = {"qwen3-0.6b": "qwen3-1.7b", "qwen2.5-vl-7b": "qwen3-8b"}
"""Shapes that were not measured, and those whose values they get."""
LENGTHS = {"gsm8k": (100, 300), "dapo-math": (150, 2500), "geometry3k": (300, 500)}
"""Mean tokens of a prompt and of an answer, by data set: assumptions, not measurements."""
GRIDS = {"geometry3k": (1, 22, 28)}
"""Patches of the image of a prompt by time, height and width: an assumption too, 154 of the prompt's tokens."""


@dataclass(frozen=True)
class Expected:
    memory_gb: float
    """Of a trainer's GPU, at its peak."""
    update_s: float
    """Forward, backward and optimizer of one step, and the reference's pass."""
    longest_answer_s: float
    """Least time of an answer of full length: every token reads all weights once."""


def update_seconds(shape_name: str, spec: JobSpec, data: str, gpus: int) -> float:
    """FLOPs over the rate; recomputation adds a third, and a reference's pass is a third of an update. The last third
    are gradients of weights, which frozen ones do not have. Every GPU sees each image once, in the tower."""
    shape, (prompt, answer), lora = PUBLISHED[shape_name], LENGTHS[data], spec.model.lora
    prompts = spec.schedule.prompts_per_step
    cost = sequence_cost(shape, 0 if lora is None else int(adapter_parameters(shape, lora)))
    flops = prompts * spec.rollout.samples_per_prompt * cost.total([prompt + answer])
    recompute = spec.trainer.activation_recompute or "recompute" in spec.trainer.backend_options
    thirds = 3 + recompute + (spec.algorithm.kl is not None) - (lora is not None)
    seeing = 0.0 if shape.tower is None else gpus * prompts * shape.tower.flops(GRIDS[data])
    measured = LIKE.get(shape_name, shape_name)
    return (flops * thirds / 3 + seeing) / (MFU[measured, spec.trainer.backend] * GPU_FLOPS * gpus)


def expected(recipe: Recipe) -> Expected:
    spec, shape = parse(recipe.tree()), PUBLISHED[recipe.shape]
    return Expected(
        peak(predict(spec, shape, recipe.gpus)).total / GB,
        update_seconds(recipe.shape, spec, recipe.data, recipe.gpus),
        spec.rollout.max_response_tokens * 2 * active_parameters(shape) / GPU_BYTES_PER_SECOND,
    )


def table_row(recipe: Recipe) -> str:
    """The row of README.md's table."""
    needs, shape, lora = expected(recipe), PUBLISHED[recipe.shape], parse(recipe.tree()).model.lora
    # Weights and two moments, float32; and the last one's folder, bfloat16, or each one's adapter, float32.
    saved = 14 * parameters(shape) if lora is None else 16 * adapter_parameters(shape, lora)
    return (
        f"| [{recipe.name}]({recipe.file.name}) | {recipe.data} | {recipe.gpus} | {needs.memory_gb:.0f} GB "
        f"| {needs.update_s:.1f} s | {needs.longest_answer_s:.1f} s | {saved / 1e9:.0f} GB |"
    )
