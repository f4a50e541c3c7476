"""What a recipe needs: memory of a trainer's GPU, seconds of an update, seconds of the longest answer. By formulas.

The constants are from BENCHMARKS.md, and the formulas give its measured peaks within a tenth
(`tests/recipes/test_expected.py`). They hold for Qwen3's dense models, whose feed-forward is 3 times as wide as the
hidden state.
"""

from dataclasses import dataclass

from millrace.bench.shapes import shape_of
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.flops import active_parameters, sequence_cost
from millrace.spec import JobSpec, parse
from recipes.catalogue import Recipe

GPU_FLOPS = 989e12
"""Of an H200 or H100 in bfloat16, without sparsity."""
GPU_BYTES_PER_SECOND = 4.8e12
"""Memory bandwidth of an H200."""
ACTIVATION_BYTES = 36
"""For each token, layer and element of the hidden state."""
INPUT_BYTES = 2
"""The same where only each layer's input is kept."""
OTHER_BYTES = 3e9
"""Logits of a chunk, gathered layers, NCCL."""
MFU = {("qwen3-1.7b", "fsdp2"): 0.451, ("qwen3-1.7b", "megatron"): 0.486} | {
    ("qwen3-8b", "fsdp2"): 0.485,
    ("qwen3-8b", "megatron"): 0.515,
}
"""Measured on one H200 without recomputation (BENCHMARKS.md, "FSDP2 beside Megatron-Core"). The 0.6B shape was not
measured: it gets the values of 1.7B, which are too good for it."""
LENGTHS = {"gsm8k": (100, 300), "dapo-math": (150, 2500)}
"""Mean tokens of a prompt and of an answer, by data set: assumptions, not measurements."""


@dataclass(frozen=True)
class Layout:
    """How a model is trained, as far as memory depends on it."""

    backend: str
    gpus: int
    tensor_parallel: int
    recompute: bool
    token_budget: int
    reference: bool


@dataclass(frozen=True)
class Expected:
    memory_gb: float
    """Of a trainer's GPU, at its peak."""
    update_s: float
    """Forward, backward and optimizer of one step, and the reference's pass."""
    longest_answer_s: float
    """Least time of an answer of full length: every token reads all weights once."""


def parameters(shape: ModelShape) -> int:
    """Weights of a dense model, but for its norms."""
    return active_parameters(shape) + (0 if shape.tied else shape.vocabulary * shape.hidden)


def layout(spec: JobSpec, gpus: int) -> Layout:
    trainer, options = spec.trainer, spec.trainer.backend_options
    recompute = trainer.activation_recompute or "recompute" in options
    tensor = int(options.get("tensor_parallel", 1))
    return Layout(trainer.backend, gpus, tensor, recompute, trainer.token_budget, spec.algorithm.kl is not None)


def memory_bytes(shape: ModelShape, used: Layout) -> float:
    """FSDP2 divides 16 bytes a parameter over all ranks: float32 weights, gradients and two moments. Megatron divides
    bfloat16 weights and float32 gradients over the tensor-parallel ranks only, and 12 bytes of optimizer over all."""
    count = parameters(shape)
    if used.backend == "fsdp2":
        state, copy = 16 * count / used.gpus, 2 * count / used.gpus
    else:
        state = 6 * count / used.tensor_parallel + 12 * count / used.gpus
        copy = 2 * count / used.tensor_parallel
    element = used.token_budget * shape.hidden / used.tensor_parallel
    kept = shape.layers * element * (INPUT_BYTES if used.recompute else ACTIVATION_BYTES)
    of_one_layer = element * ACTIVATION_BYTES if used.recompute else 0
    return state + (copy if used.reference else 0) + kept + of_one_layer + OTHER_BYTES


def update_seconds(shape_name: str, spec: JobSpec, data: str, used: Layout) -> float:
    """FLOPs over the rate; recomputation adds a third, and a reference's pass is a third of an update."""
    prompt, answer = LENGTHS[data]
    samples = spec.schedule.prompts_per_step * spec.rollout.samples_per_prompt
    flops = samples * sequence_cost(shape_of(shape_name)).total([prompt + answer])
    thirds = 3 + used.recompute + used.reference
    measured = "qwen3-1.7b" if shape_name == "qwen3-0.6b" else shape_name
    return flops * thirds / 3 / (MFU[measured, used.backend] * GPU_FLOPS * used.gpus)


def expected(recipe: Recipe) -> Expected:
    spec, shape = parse(recipe.tree()), shape_of(recipe.shape)
    used = layout(spec, recipe.gpus)
    return Expected(
        memory_bytes(shape, used) / 1e9,
        update_seconds(recipe.shape, spec, recipe.data, used),
        spec.rollout.max_response_tokens * 2 * active_parameters(shape) / GPU_BYTES_PER_SECOND,
    )


def table_row(recipe: Recipe) -> str:
    """The row of README.md's table."""
    needs, count = expected(recipe), parameters(shape_of(recipe.shape))
    return (
        f"| [{recipe.name}]({recipe.file.name}) | {recipe.data} | {recipe.gpus} | {needs.memory_gb:.0f} GB "
        f"| {needs.update_s:.1f} s | {needs.longest_answer_s:.1f} s | {14 * count / 1e9:.0f} GB |"
    )
