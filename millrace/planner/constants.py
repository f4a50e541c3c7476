"""Constants of the formulas, the same for every GPU and every model. docs/planner.md says where each is used."""

# What training reaches, of BENCHMARKS.md, "The megatron backend on GPUs" and "FSDP2 beside Megatron-Core" (H200).

LAYER_SHARE = 0.8
"""Rate of the products of a layer over that of products of large matrices (8B shape, 12 layers)."""
ATTENTION_SHARE = {"megatron": 0.64, "fsdp2": 0.47}
"""Rate of attention over that of the products of a layer (sequences of 32,768 and 131,072 tokens)."""
ELEMENTWISE_PASSES = 2.0
"""Times that each kept activation travels to or from the GPU's memory in a forward pass; twice that in a backward
pass."""
LOGIT_PASSES = 4.0
"""The same for each logit."""
MEMORY_SHARE = 0.8
"""Share of the published bandwidth of memory that kernels reach."""
EXPERT_PRODUCT_S = {"megatron": 50e-6, "fsdp2": 24e-6}
"""Seconds that one product of one expert takes however few tokens it has: two in a forward pass of a layer, four in a
backward pass (30B-A3B shape, 6 to 10 layers)."""
ADAPTER_PASSES = 5.0
"""The same as ELEMENTWISE_PASSES for the inputs and outputs of layers with an adapter (LoRA 32, 8B shape, 8 layers)."""
LINK_SHARE = 0.68
"""Share of the published bandwidth between GPUs that messages reach: 370 GB/s of 450, and 1/1.2 of that in rounds."""
NETWORK_SHARE = 0.8
"""The same for network cards. Not measured here."""
HOST_LINK_SHARE = 0.7
"""The same for the link to host memory (`offload_activations`, 8B shape, 8 layers)."""
OPTIMIZER_BYTES = 38.0
"""Bytes of GPU memory that an update reads and writes for each parameter: gradient, its norm, float32 weight, both
moments, and the weight in bfloat16."""
HOST_UPDATE_BYTES = 28.0
"""The same of host memory, for a parameter whose optimizer is there."""
HOST_UPDATE_BYTES_S = 45e9
"""Bytes a second of that on one rank (`optimizer_offload_fraction` 1, 8B shape, 4 and 8 layers)."""
HOST_MEMORY_SHARE = 0.4
"""Share of a host's bandwidth that all its ranks together reach. Not measured here."""
HOST_TRAFFIC_BYTES = 6.0
"""Bytes over the link to the host for such a parameter: its gradient in float32 there, the weight in bfloat16 back."""

# What engines reach.

DECODE_SHARE = 0.8
"""Share of the bandwidth of memory at which weights, keys and values are read."""
STEP_S = 1.2e-3
"""Seconds of the host for a step of an engine."""
REQUEST_S = 28.5e-6
"""Seconds of the host for each running request in a step (SGLang, 256 requests, a model of 0.4 million parameters: 8.5
ms a step)."""
LOGIT_S = 0.05e-9
"""Seconds to sample, for each logit (vLLM 0.26, 1.7B shape, 256 requests on an H200: 20,700 tokens/s)."""
EAGER_OPERATION_S = 32e-6
"""Seconds of the host to start one operation if the engine has no CUDA graphs (the same with `enforce_eager`: 12,000
tokens/s)."""
OPERATIONS = {"attention": 8, "recurrent": 10, "latent": 28, "dense": 4, "experts": 9, "shared": 11, "parallel": 2}
"""Operations of a layer by its parts, counted in vLLM's models: DeepSeek-V3's rotary embedding is 13 of them. `shared`:
shared experts and the routing in groups. `recurrent`: of a step that gives each request one token; not measured."""
REDUCE_S, REDUCE_ACROSS_HOSTS_S = 15e-6, 80e-6
"""Seconds that a sum over the workers takes however small it is, within a host and across hosts. Not measured here."""

# What publications reach, of BENCHMARKS.md, "Publication on GPUs".

COMMIT_PASSES = 5.6
"""Bytes of GPU memory that putting a received version in place takes, over its size: the copy and the checksums."""
PUBLICATION_S = 0.003
"""Seconds of the messages of a publication."""
CUT_PIECE_S = 7e-6
"""Seconds to unpack a tensor of which a worker holds a part (30B-A3B to TP2)."""
GATHERED_TENSOR_S = 0.84e-3
"""Seconds for each tensor if tensors are gathered and broadcast (30B-A3B: 15.8 s for 18,867)."""
TURNS_BYTES_S = 6e9
"""Bytes a second at which weights change between trainer and engine if both take turns on the same GPUs: 72B in
24 s, as verl's users report it (issue 7060). Not measured here."""

# Room that is left free.

HOST_ROOM = 0.08
"""Share of a host's memory that is left to the system, services and files."""
PROCESS_BYTES = 2.4e9
"""Host memory of one rank before it holds anything."""
