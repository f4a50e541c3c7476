"""Makes the page on models: `python docs/models_page.py > docs/models.md`.

It comes from the tables of the backends and engines, and from `FAMILIES`, which names the tests.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.data.pictures import MODELS
from millrace.differences import DEEPSEEK_YARN, LARGEST_EPSILON, LATENT_NORMS
from millrace.engines import sglang
from millrace.engines.vllm import (
    ASSUMED,
    EQUAL_ON_CPU,
    IGNORED,
    IN_TURNS,
    IN_TURNS_WITH_IMAGES,
    NO_WINDOWS,
    NORMALISED,
    SHIFTED_WINDOWS,
    TOWER_THETA,
    UNEQUAL,
    UNEQUAL_ON_CPU,
)
from millrace.fsdp2.architectures import ATTENTIONS, BY_REASON, GATED_DELTA, RIGHT, RIGHT_WITH, UNTRIED
from millrace.megatron.architectures import ARCHITECTURES
from services.rollout.engines.vllm.options import SHOWN_ON_GPUS, SHOWN_RECURRENT, TEXT_PARTS

ENGINES, MEGATRON = "tests/services/rollout/engines/", "tests/services/trainer/backends/megatron/"
FSDP2 = "tests/services/trainer/backends/fsdp2/"
VLLM = f"{MEGATRON}test_vllm.py"
RECURRENT = GATED_DELTA | set(TEXT_PARTS)
"""Model types with layers of GatedDeltaNet, in the language model or inside."""
YES, NO, UNKNOWN = "yes", "refused", "not tried"
COLUMNS = (
    "family",
    "model types",
    "FSDP2",
    "Megatron-Core",
    "vLLM on the CPU",
    "Transformers engine",
    "vLLM on GPUs, SGLang",
)


@dataclass(frozen=True)
class Family:
    """A family of models, and the tests that compare it with transformers."""

    title: str
    types: tuple[str, ...]
    vllm: str = ""
    """The test of vLLM's CPU build; empty where there is none."""
    note: str = ""

    @property
    def tests(self) -> dict[str, str]:
        """The test that runs the family, by backend or engine."""
        recurrent = RECURRENT.issuperset(self.types)
        name = "test_images" if self.images else "test_recurrent" if recurrent else "test_sweep"
        found = {"FSDP2": f"{FSDP2}{name}.py"} if self.fsdp2 else {}
        if self.megatron:
            found["Megatron-Core"] = f"{MEGATRON}test_parity.py"
        if self.vllm:
            found["vLLM"] = self.vllm
        if self.fsdp2 and not (recurrent or self.images):
            found["Transformers"] = f"{FSDP2}test_sweep.py"
        return found

    @property
    def images(self) -> bool:
        """Whether prompts may have images, in both trainers and vLLM."""
        return MODELS.issuperset(self.types)

    @property
    def fsdp2(self) -> bool:
        return RIGHT.issuperset(self.types) or self.images

    @property
    def megatron(self) -> bool:
        return set(ARCHITECTURES).issuperset(self.types)

    def row(self) -> str:
        """A line of the table."""
        recurrent = RECURRENT.issuperset(self.types)
        trainers = [YES if holds else NO for holds in (self.fsdp2, self.megatron)]
        vllm = UNKNOWN if not self.vllm else NO if recurrent and not set(SHOWN_RECURRENT) >= set(self.types) else YES
        others = NO if recurrent else YES if self.fsdp2 and not self.images else UNKNOWN
        cells = (f"{self.title}{self.note and f' ({self.note})'}", _names(self.types), *trainers, vllm, others)
        on_gpus = NO if recurrent and not set(SHOWN_ON_GPUS) & set(self.types) else "see below"
        return f"| {' | '.join(cells)} | {on_gpus} |"


FAMILIES = (
    Family("Qwen3", ("qwen3",), VLLM),
    Family("Qwen3 with experts", ("qwen3_moe",), VLLM),
    Family("Qwen2 and 2.5", ("qwen2",), VLLM),
    Family("Qwen2.5-VL", ("qwen2_5_vl",), VLLM, "images: below"),
    Family("Qwen3-VL, dense", ("qwen3_vl",), f"{ENGINES}test_image_prompts.py", "images: below"),
    Family("Qwen3-VL with experts", ("qwen3_vl_moe",), f"{ENGINES}test_image_prompts.py", "images: below"),
    Family("Qwen3-Next", ("qwen3_next",), f"{ENGINES}test_hybrid.py"),
    Family("Qwen3.5 and 3.6, the language model alone", ("qwen3_5_text",), f"{ENGINES}test_hybrid.py"),
    Family("Qwen3.5 and 3.6", ("qwen3_5",), f"{ENGINES}test_image_prompts.py", "images: below"),
    Family("Qwen3.5 and 3.6 with experts, the language model alone", ("qwen3_5_moe_text",), f"{ENGINES}test_hybrid.py"),
    Family("Qwen3.5 and 3.6 with experts", ("qwen3_5_moe",), f"{ENGINES}test_image_prompts.py", "images: below"),
    Family("Mixtral", ("mixtral",), VLLM),
    Family("DeepSeek-V3, Moonlight", ("deepseek_v3",), VLLM),
)

HEADING = """# Models

This page is made by `python docs/models_page.py > docs/models.md` from the tables of backends and engines: edit those,
not this page.

Each cell says whether the log-probabilities of a tiny random model were compared with transformers', in float32 on the
CPU; for trainers the gradients too. `tests/docs/test_models.py` checks that the tests of each cell name the family."""
ON_GPUS = """vLLM on GPUs, and SGLang, run the models of the table that vLLM's CPU build runs, except where they are
refused; [BENCHMARKS.md](../BENCHMARKS.md) says what was run on GPUs. There both
trainers compute layers of GatedDeltaNet with flash-linear-attention. FSDP2 was run so, one call for a whole packed row;
Megatron-Core was not. A host without it is refused, and a Hopper GPU with Triton from 3.4 to 3.7.0 and without
tilelang, since gradients are wrong there. Of these models vLLM runs {gpu} on GPUs; it refuses the others.

Prompts with images (`data.images`, [data](data.md#images)) are trained by FSDP2 and Megatron-Core (dense models) and
generated by vLLM, for {images}. In float32 on the CPU log-probabilities of answers after images at the beginning, at
the end, beside each other and without any are within 0.0001 of transformers' in both trainers, packed and on two ranks
(of Megatron-Core tensor, pipeline and context parallel ones too), gradients too, and within 0.001 in vLLM, before,
during and after publications. The same holds with adapters of the language model's layers
([lora](lora.md#prompts-with-images)), compared with PEFT. On GPUs, in bfloat16, one of a random Qwen2.5-VL-7B was
trained ([BENCHMARKS.md](../BENCHMARKS.md#prompts-with-pictures-on-gpus)). The tower is frozen and read from the model
folder by every rank (on Megatron-Core those of the first pipeline stage) and every worker of an engine; what that of
Qwen3-VL adds to the hidden states after the first layers is frozen with it, and on Megatron-Core these layers have to
be on the first stage. On FSDP2 `trainer.train_tower` trains the tower, for all of them: gradients are within 0.0001 of
transformers', also on two ranks of which one has no image, and vLLM is within 0.001 after each publication. Of Qwen3.5
the trainer builds the language model in its own class, for text as for images: tensors and adapters have its names, as
`model.layers.0…`, beside those of a trained tower, `model.visual…`, and layers of GatedDeltaNet compute the tokens of
images as those of text. FSDP2 reads, publishes and exports experts as the folder has them: all of a layer in one
tensor, as the published ones do, or each apart. Those of Qwen3-VL are published and exported as published folders have
them, inputs before outputs, also from a folder that transformers 5 wrote. Qwen3-VL and Qwen3.5 with images, trained
towers, and experts with images have not run on GPUs, nor have images on Megatron-Core but in a small model on one.
`sdpa` attention of Qwen2.5-VL, a critic, environments and agents are refused with images, on Megatron-Core models with
experts too; so are all other models and the other engines."""
ON_FSDP2 = """\
The FSDP2 backend trains what the `transformers` library has, if a packed micro-batch gives every sequence what it
gets alone. This is not assumed: before a model is loaded, and by `millrace validate`, a tiny model of its config is
computed in both ways on the CPU in float32. It keeps the kinds of layers, rotary positions, windows, caps, sinks and
biases of the config, and has few layers, heads and experts with random weights. Short and long sequences lie beside
each other. A model is accepted if all log-probabilities are within 0.0001 nats of those of each sequence alone with
transformers' eager attention, and its gradients within 0.1 %. A model that makes more of rounding than others (Gemma
3n) may differ by as much as weights that change in their last bit make it, and by 0.001 at most. The message of a
refusal has the measured difference, and what the attention leaves out.

`segments` and `varlen` stand for each other, as they take the same. For `flash_attention_2` and
`flash_attention_4`, which honour the same, a slow reference is computed.

Refused are also rotary positions of which engine and trainer have different rules of length: `dynamic`, except
Hunyuan's with `alpha`; `longrope` (Phi-3.5, Phi-4-mini), unless the longest text of the job, `data.max_prompt_tokens`
and `rollout.max_response_tokens` together, has at most `original_max_position_embeddings` tokens.

The tables have every causal language model of transformers by its `model_type`, with the default entries of its
config; other entries may decide otherwise. Each accepted one without layers of GatedDeltaNet was also compared with the
transformers engine, which decodes with a cache: log-probabilities of tokens that follow prompts of several lengths are
within 0.0001 nats."""
ON_VLLM = """\
Each model type that FSDP2 trains was tried with vLLM 0.32 on the CPU, in float32: a tiny random model was published by
shards and whole, and its log-probabilities of texts of 5 to 130 tokens beside each other were compared with those of
each alone in transformers. What vLLM is known to compute otherwise is refused by replicas with vLLM, and told by
`millrace validate`; replicas with the transformers engine run it."""
ON_SGLANG = """\
What the model files of SGLang 0.5.16 compute otherwise than transformers is refused by replicas with SGLang, and told
by `millrace validate`. It was read there, not measured; architectures for which SGLang has no file of its own, and runs
transformers' code, were looked at only for their windows."""
NOT_RUN = """The others did not run: this build of vLLM does not start on them, or replicas refuse them by the names of
tensors for which vLLM has no place."""


Row = tuple[str, str]
"""Model types, and what is not equal."""


def page() -> str:
    """The page."""
    every = ", ".join(f"`{name}`" for name in ATTENTIONS)
    families = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *(family.row() for family in FAMILIES)]
    parts = [
        HEADING,
        "\n".join(families),
        ON_GPUS.replace("{images}", _names(MODELS)).replace("{gpu}", _names(SHOWN_ON_GPUS)),
        "# Models on FSDP2",
        ON_FSDP2,
        "## Accepted",
    ]
    parts += [f"With each attention ({every}):", _names(RIGHT), "With some:"]
    rows = [f"| `{name}` | {_names(found)} |" for name, found in sorted(RIGHT_WITH.items())]
    parts.append("\n".join(["| model type | `trainer.backend_options.attention` |", "|---|---|", *rows]))
    parts.append("## Refused")
    refused = [f"| {reason} | {_names(sorted(names.split()))} |" for reason, names in BY_REASON.items()]
    parts.append("\n".join(["| reason | model types |", "|---|---|", *refused]))
    parts += ["## Not tried", "No small model can be made of the defaults of these. The config of a job is tried:"]
    parts += [_names(UNTRIED), "# Models in vLLM", ON_VLLM, "Within 0.0001 nats:", _names(EQUAL_ON_CPU)]
    parts += ["Refused:", _unequal(), NOT_RUN, "# Models in SGLang", ON_SGLANG, _unequal_in_sglang()]
    return "\n\n".join(parts) + "\n"


def _of_entries(assumed: Mapping[str, Mapping[str, Any]], ignored: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Rows of the model types in whose configs an engine and transformers follow other entries."""
    kinds = sorted({*assumed, *ignored})
    given = {kind: {**assumed.get(kind, {}), **ignored.get(kind, {})} for kind in kinds}
    return [(f"`{kind}`", f"with another entry than {_entries(given[kind])}") for kind in kinds]


def _of_both() -> list[Row]:
    """Rows of what vLLM and SGLang compute alike, and transformers otherwise."""
    yarn = (
        "with an `attention_factor`, `truncate: false`, `mscale` or `mscale_all_dim` without the other in the `yarn` "
        "settings, or another `rope_type`"
    )
    return [
        ("`deepseek_v2`", "with `topk_method: greedy` and several groups of experts"),
        (
            _names(LATENT_NORMS),
            f"with an `rms_norm_eps` over {LARGEST_EPSILON:g}: transformers has 1e-06 in the norms of latents",
        ),
        (_names(DEEPSEEK_YARN), yarn),
        ("all", "with an `attention_factor`, a `factor` or an `mscale` of its own in the `longrope` settings"),
    ]


def _unequal() -> str:
    """The table of what vLLM computes otherwise than transformers."""
    windows = "in texts longer than `sliding_window`: vLLM's windows have one token more"
    axes = "without `mrope_section` and `mrope_interleaved: true`, or with a `rope_type` of its own"
    rows = [
        (_names(SHIFTED_WINDOWS), windows),
        (_names(NO_WINDOWS), "with a `sliding_window`, in texts longer than it: transformers has none in these models"),
        ("`qwen2_moe`", "with `use_sliding_window: true`, in texts longer than `sliding_window`"),
        ("`ministral3`", "with a `llama_4_scaling_beta`, in texts longer than `original_max_position_embeddings`"),
        *_of_entries(ASSUMED, IGNORED),
        *_of_both(),
        (_names(IN_TURNS), axes),
        (_names(IN_TURNS_WITH_IMAGES), f"in jobs with images, {axes}"),
        (_names(tuple(NORMALISED)), "with `norm_topk_prob: false`; Qwen3-VL also without the entry"),
        ("all with a tower", f"in jobs with images, with another `rope_theta` than {TOWER_THETA:g} in `vision_config`"),
        *((f"`{name}`", reason) for name, reason in {**UNEQUAL, **UNEQUAL_ON_CPU}.items()),
    ]
    return _table(rows)


def _unequal_in_sglang() -> str:
    """The table of what SGLang computes otherwise than transformers."""
    windows = "in texts longer than `sliding_window`"
    rows = [
        *_of_entries(sglang.ASSUMED, sglang.IGNORED),
        (_names(sglang.UNSCALED), "with a `rope_type` other than `default`: SGLang does not scale"),
        (_names(frozenset(sglang.PARTIAL)), "with a `partial_rotary_factor` only inside `rope_parameters`"),
        ("all", "with an `attention_factor` of its own in the `yarn` settings of rotary positions"),
        (_names(sglang.FULL_ATTENTION), f"{windows}: SGLang has none"),
        (_names(sglang.FULL_IF_USED), f"with `use_sliding_window: true`, {windows}: SGLang has none"),
        (_names(sglang.SHIFTED_WINDOWS), f"{windows}: SGLang's windows have one token more"),
        *_of_both(),
    ]
    return _table(rows)


def _table(rows: Sequence[Row]) -> str:
    return "\n".join(["| model type | what is not equal |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])


def _entries(given: Mapping[str, Any]) -> str:
    """Entries of a config as JSON."""
    return ", ".join(f"`{name}: {json.dumps(value)}`" for name, value in given.items())


def _names(names: object) -> str:
    assert isinstance(names, tuple | list | frozenset)
    ordered = names if isinstance(names, tuple) else sorted(names)
    return ", ".join(f"`{name}`" for name in ordered)


if __name__ == "__main__":
    print(page(), end="")
