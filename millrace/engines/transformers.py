"""Transformers: the plain engine for CPUs and for comparison. Its options and the engine are in
`services/rollout/engines/transformers`."""

from millrace.descriptors import EngineDescriptor
from millrace.software import TESTED_TORCH, TESTED_TRANSFORMERS, Software

DESCRIPTOR = EngineDescriptor(
    software=Software(
        title="transformers with torch",
        distributions=("transformers",),
        imports=("transformers", "torch", "jinja2"),
        extras=("transformers", "gpu-transformers"),
        also_shown=("torch",),
        tested={"transformers": TESTED_TRANSFORMERS, "torch": TESTED_TORCH},
    ),
    implementation="services.rollout.engines.transformers.engine:TransformersEngine",
    scoring="services.rollout.engines.transformers.scoring:TransformersScoring",
    replies="services.rollout.engines.transformers.replies:TransformersReplies",
    options_class="services.rollout.engines.transformers.engine:Options",
    options_example={"max_num_seqs": 64},
    option_bounds={"max_num_seqs": (1, 65_536)},
    preloaded=("services.rollout.engines.transformers.decoding", "transformers.models.qwen3.modeling_qwen3"),
)
