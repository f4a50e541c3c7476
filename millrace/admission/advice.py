"""Values with which a valid job likely learns more slowly, or that have no effect, and layouts of its ranks over hosts
that slow it down needlessly. Needs no torch."""

from collections.abc import Iterator
from pathlib import Path

from millrace.backends import BACKENDS
from millrace.data.model_folder import text_config
from millrace.descriptors import Hosts, imported
from millrace.engines import sglang, vllm
from millrace.errors import InvalidJob, Mistake, wrong_value
from millrace.lora import absent
from millrace.megatron.adapters import EXPERTS, linear_layers
from millrace.megatron.architectures import read_shape
from millrace.megatron.weights import LOCAL
from millrace.spec.job import JobSpec
from millrace.spec.lora import MEGATRON_NAMES, OF_EXPERTS


def across_hosts(spec: JobSpec, ranks: int, ranks_per_host: int) -> list[Mistake]:
    """Fields of the job that have a better value with this number of ranks, and of ranks on each host. The job runs as
    it is."""
    hosts = Hosts(ranks, ranks_per_host)
    descriptor = BACKENDS[spec.trainer.backend]
    if not hosts.several or not descriptor.across_hosts:
        return []
    return list(imported(descriptor.across_hosts)(spec, hosts))


USUAL_RANK = 32
"""An adapter of this rank has room for what a model of up to some tens of billions of parameters learns."""
LEAST_RATE = 5e-6
"""Learning rates of adapters are about ten times those of all weights, which are mostly between 5e-7 and 3e-6."""


def advice(spec: JobSpec) -> list[Mistake]:
    """Fields of the job with a value that is likely better. The job runs as it is."""
    return [*_rank(spec), *_learning_rate(spec), *_layers(spec), *_engine(spec)]


def _engine(spec: JobSpec) -> Iterator[Mistake]:
    """A model that replicas with vLLM or with SGLang refuse, and those with another engine run. What vLLM's CPU build
    alone computes otherwise counts too: where the replicas run is not known here."""
    folder = Path(spec.model.path)
    if not (folder / "config.json").is_file():
        return
    try:
        config = text_config(folder)
    except InvalidJob:
        return
    longest, images = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens, spec.data.images is not None
    if reason := vllm.unequal(config, longest, on_cpu=True, images=images):
        told = f"replicas with vLLM refuse it: {reason}"
        yield wrong_value("model.path", spec.model.path, told, vllm.fix_for_unequal(images))
    elif not images and (reason := sglang.unequal(config, longest)):
        told = f"replicas with SGLang refuse it: {reason}"
        yield wrong_value("model.path", spec.model.path, told, "start replicas with another engine.")


def _layers(spec: JobSpec) -> Iterator[Mistake]:
    """The names of Megatron's layers for which the model has no layer, if its architecture is known here and its folder
    is on this machine."""
    lora, folder = spec.model.lora, Path(spec.model.path)
    if lora is None or not (folder / "config.json").is_file():
        return
    try:
        shape = read_shape(folder)
    except InvalidJob:
        return
    layers = set(linear_layers(shape, LOCAL))
    if spec.trainer.backend == "megatron" and shape.experts is not None:  # elsewhere experts have no adapter
        layers |= {f"{EXPERTS}.{name}" for fused in OF_EXPERTS for name in MEGATRON_NAMES[fused]}
    yield from absent(lora, layers)


def _rank(spec: JobSpec) -> Iterator[Mistake]:
    """An adapter that is trained further keeps the rank that it has."""
    lora = spec.model.lora
    if lora is None or lora.adapter_path is not None or lora.rank is None or lora.rank >= USUAL_RANK:
        return
    reason = f"adapters of a rank under {USUAL_RANK} learn more slowly"
    yield wrong_value("model.lora.rank", lora.rank, reason, f"give {USUAL_RANK} or more.")


def _learning_rate(spec: JobSpec) -> Iterator[Mistake]:
    """A rate of 0 changes nothing on purpose."""
    rate = spec.trainer.optimizer.lr
    if spec.model.lora is not None and 0.0 < rate < LEAST_RATE:
        reason = "this is a learning rate for all weights, and adapters learn slowly with it"
        fix = "give about ten times the rate for all weights, such as 1.0e-5."
        yield wrong_value("trainer.optimizer.lr", rate, reason, fix)
