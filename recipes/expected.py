"""What a recipe needs: memory of a trainer's GPU, seconds of an update, seconds of the longest answer. By formulas.

Memory is that of `millrace/memory`. The other constants are from BENCHMARKS.md.
"""

from dataclasses import dataclass

from millrace.megatron.architectures.published import shape_of
from millrace.megatron.architectures.shape import active_parameters, sequence_cost
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
measured: it gets the values of 1.7B, which are too good for it."""
LENGTHS = {"gsm8k": (100, 300), "dapo-math": (150, 2500)}
"""Mean tokens of a prompt and of an answer, by data set: assumptions, not measurements."""


@dataclass(frozen=True)
class Expected:
    memory_gb: float
    """Of a trainer's GPU, at its peak."""
    update_s: float
    """Forward, backward and optimizer of one step, and the reference's pass."""
    longest_answer_s: float
    """Least time of an answer of full length: every token reads all weights once."""


def update_seconds(shape_name: str, spec: JobSpec, data: str, gpus: int) -> float:
    """FLOPs over the rate; recomputation adds a third, and a reference's pass is a third of an update."""
    prompt, answer = LENGTHS[data]
    samples = spec.schedule.prompts_per_step * spec.rollout.samples_per_prompt
    flops = samples * sequence_cost(shape_of(shape_name)).total([prompt + answer])
    recompute = spec.trainer.activation_recompute or "recompute" in spec.trainer.backend_options
    thirds = 3 + recompute + (spec.algorithm.kl is not None)
    measured = "qwen3-1.7b" if shape_name == "qwen3-0.6b" else shape_name
    return flops * thirds / 3 / (MFU[measured, spec.trainer.backend] * GPU_FLOPS * gpus)


def expected(recipe: Recipe) -> Expected:
    spec, shape = parse(recipe.tree()), shape_of(recipe.shape)
    return Expected(
        peak(predict(spec, shape, recipe.gpus)).total / GB,
        update_seconds(recipe.shape, spec, recipe.data, recipe.gpus),
        spec.rollout.max_response_tokens * 2 * active_parameters(shape) / GPU_BYTES_PER_SECOND,
    )


def table_row(recipe: Recipe) -> str:
    """The row of README.md's table."""
    needs, count = expected(recipe), parameters(shape_of(recipe.shape))
    return (
        f"| [{recipe.name}]({recipe.file.name}) | {recipe.data} | {recipe.gpus} | {needs.memory_gb:.0f} GB "
        f"| {needs.update_s:.1f} s | {needs.longest_answer_s:.1f} s | {14 * count / 1e9:.0f} GB |"
    )
