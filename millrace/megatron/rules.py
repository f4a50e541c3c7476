"""Configurations that cannot run, each with the arithmetic and the fix. Pure and torch-free.

They are found before any rank builds a model: those of the model when the job is submitted, those of the trainer (how
many ranks, with or without CUDA) by the trainer. Layouts of ranks that cross hosts needlessly are reported, and run:
the tensor-parallel ranks of a model exchange activations in every layer, and so do the ranks that share a sequence or
the experts; pipeline stages and copies of the model exchange little.
"""

from collections.abc import Iterator
from pathlib import Path

from millrace.backends.megatron import MegatronOptions, parse
from millrace.descriptors import Hosts
from millrace.errors import InvalidJob, Mistake, refused, wrong_value
from millrace.lora import FIELD, AskedAdapter
from millrace.megatron.adapters import choose_layers, is_of_expert
from millrace.megatron.architectures import read_shape
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import LOCAL, Layers, unread
from millrace.spec import JobSpec
from millrace.spec.lora import Lora
from millrace.weights.folder_tensors import other_values, stored_shapes

CRITIC_FIELD = "algorithm.critic.path"


def across_hosts(spec: JobSpec, hosts: Hosts) -> Iterator[Mistake]:
    """Fields with a better value. A group that no host could hold is the user's choice, unless it is a tensor-parallel
    one: pipeline stages do the same over hosts."""
    options = parse(spec.trainer.backend_options)
    tensor = options.tensor_parallel
    if hosts.cross(tensor):
        within = hosts.largest_within(tensor)
        stages = options.pipeline_parallel * tensor // within
        fix = f"give {within}, and pipeline_parallel {stages}."
        yield _crosses("tensor_parallel", tensor, "sum activations", hosts, fix)
        return
    yield from _sharing(options, hosts)


def _sharing(options: MegatronOptions, hosts: Hosts) -> Iterator[Mistake]:
    """Groups whose ranks lie one tensor-parallel group apart each."""
    context, tensor = options.context_parallel, options.tensor_parallel
    if context <= hosts.ranks_per_host and hosts.cross(context, tensor):
        closer = _closer(context, tensor, hosts)
        stages = options.pipeline_parallel * tensor // max(1, closer)
        fix = f"give tensor_parallel {closer}, and pipeline_parallel {stages}." if closer else ""
        fix = fix or f"give {hosts.largest_within(context, tensor)}."
        yield _crosses("context_parallel", context, "exchange keys and values", hosts, fix)
    expert, expert_tensor = options.expert_parallel, options.expert_tensor_size
    if expert <= hosts.ranks_per_host and hosts.cross(expert, expert_tensor):
        closer = _closer(expert, expert_tensor, hosts)
        fix = f"give expert_tensor_parallel {closer}." if closer else ""
        fix = fix or f"give {hosts.largest_within(expert, expert_tensor)}."
        yield _crosses("expert_parallel", expert, "exchange tokens", hosts, fix)


def _closer(size: int, stride: int, hosts: Hosts) -> int:
    """The largest divisor of `stride` with which no group of `size` ranks lies on several hosts; 0 if none does."""
    return next((one for one in range(stride, 0, -1) if stride % one == 0 and not hosts.cross(size, one)), 0)


def _crosses(name: str, value: int, what: str, hosts: Hosts, fix: str) -> Mistake:
    reason = f"its ranks {what} in every layer, and lie on several hosts of {hosts.ranks_per_host} ranks"
    return wrong_value(f"trainer.backend_options.{name}", value, reason, fix)


def check_submission(spec: JobSpec) -> None:
    """The checks that need no trainer. Raises InvalidJob with every rule that is broken."""
    options, critic = parse(spec.trainer.backend_options), spec.algorithm.critic
    check(options, shape := read_shape(Path(spec.model.path)), None, cuda=True, images=spec.data.images is not None)
    _check_replay(spec, options, shape)
    if spec.model.weights is None:
        _check_folder(Path(spec.model.path), shape, "model.path")
    if spec.model.lora is not None:
        check_adapter(spec.model.lora, options, shape, LOCAL)
    if critic is not None and critic.path is not None:
        check(options, own := read_shape(Path(critic.path), CRITIC_FIELD), None, cuda=True)
        _check_folder(Path(critic.path), own.as_critic(), CRITIC_FIELD)


def _check_folder(folder: Path, shape: ModelShape, field: str) -> None:
    """Raises InvalidJob if names or shapes of the folder's tensors show that the model does not take one."""
    stored, place = stored_shapes(folder), f"{field}: {folder}"
    found = unread(shape, stored)
    found.check(place)
    for name, source in found.copies:
        if stored[name] != stored[source]:
            raise other_values(place, name, source)


def _check_replay(spec: JobSpec, options: MegatronOptions, shape: ModelShape) -> None:
    """Raises InvalidJob if the job replays the engine's experts and the trainer could not do so."""
    if not spec.algorithm.router_replay:
        return
    if shape.experts is None:
        raise refused("algorithm.router_replay", True, f"{shape.architecture} has no experts", "leave it out.")
    recompute = options.recompute
    if recompute.granularity == "selective" and "moe" in recompute.modules:
        reason = "with algorithm.router_replay, experts recomputed separately would not get the engine's choices"
        fix = "set granularity to full, leave moe out of the modules, or leave algorithm.router_replay out."
        raise refused("trainer.backend_options.recompute.modules", list(recompute.modules), reason, fix)


def check_adapter(lora: Lora, options: MegatronOptions, shape: ModelShape, layers: Layers) -> frozenset[str]:
    """The layers that get the job's adapter. Raises InvalidJob with every rule that is broken."""
    asked = AskedAdapter.of(lora)
    chosen = choose_layers(asked, shape, layers)
    if mistakes := [*_adapters(asked, options, of_experts=any(is_of_expert(layer) for layer in chosen))]:
        raise InvalidJob.of(mistakes)
    return chosen


def _adapters(asked: AskedAdapter, o: MegatronOptions, *, of_experts: bool) -> Iterator[Mistake]:
    """What a job with an adapter cannot have."""
    lora, path = asked.options, asked.options.adapter_path
    if lora.dora:
        reason, fix = "the megatron backend trains no magnitudes of weights", "or set trainer.backend to fsdp2."
        if path is None:
            yield wrong_value("model.lora.dora", True, reason, f"leave it out, {fix}")
        else:
            yield wrong_value(FIELD, path, f"it is an adapter of DoRA, and {reason}", f"give one without, {fix}")
    if of_experts and not lora.merge:
        reason = "engines have no place for adapters of routed experts"
        other = (
            "leave experts, linear_fc1 and linear_fc2 out of target_modules"
            if path is None
            else "give an adapter without them"
        )
        yield wrong_value("model.lora.merge", False, reason, f"set it to true, or {other}.")
    if of_experts and o.expert_tensor_size not in (1, o.tensor_parallel):
        reason = "adapters of experts need experts that are whole or split like other layers"
        yield _broken("expert_tensor_parallel", o.expert_tensor_size, reason, f"set it to 1 or {o.tensor_parallel}")
    if o.offload_reference:
        reason = "with model.lora the reference is the model without its adapter, and takes no memory"
        yield _broken("offload_reference", True, reason, "leave it out")
    if o.experts.bias_update_rate:
        reason = "with model.lora routers stay as they are"
        yield _broken("experts.bias_update_rate", o.experts.bias_update_rate, reason, "set it to 0")


def check(
    options: MegatronOptions, shape: ModelShape, world_size: int | None, *, cuda: bool, images: bool = False
) -> None:
    """Raises InvalidJob with every rule that is broken. `images`: whether prompts have images."""
    broken = broken_rules(options, shape, world_size, cuda=cuda)
    if images:
        broken += _images(options, shape)
    if broken:
        raise InvalidJob.of(broken)


def _images(o: MegatronOptions, s: ModelShape) -> Iterator[Mistake]:
    turned = int(s.head_dim * s.rope.fraction) // 2
    if len(s.rope.sections) != 3 or sum(s.rope.sections) != turned:
        stated = list(s.rope.sections) or None
        reason = f"its config says mrope_section = {stated}, and images need three numbers with the sum {turned}"
        yield wrong_value("model.path", s.architecture, reason, "correct the config, or leave data.images out.")
    if s.experts is not None:
        reason = f"on Megatron-Core images were not shown to be right in a model with experts ({s.architecture})"
        yield wrong_value("data.images", "given", reason, "set trainer.backend to fsdp2, or leave it out.")
    yield from _deepstack(o, s)


def _deepstack(o: MegatronOptions, s: ModelShape) -> Iterator[Mistake]:
    """Only the first stage has the tower, so the layers that add its features have to lie there, in the first chunk."""
    if o.pipeline_parallel == 1 or any(_pipeline(o, s)):
        return
    needed, chunks = min(s.deepstack_layers, s.layers), o.virtual_pipeline
    layers = len(Topology(o.ranks_multiple, o).layers_of(0, 0, s.layers))
    if layers < needed:
        chunk, other = ("", "pipeline_parallel") if chunks == 1 else ("the first chunk of ", "virtual_pipeline")
        where = f"{chunk}the first pipeline stage"
        reason = f"{s.architecture} adds features of images after its first {needed} layers, and {where} has {layers}"
        fix = f"set it to {needed * chunks} or more, or lower {other}"
        yield _broken("first_stage_layers", o.first_stage_layers, reason, fix)


def broken_rules(options: MegatronOptions, shape: ModelShape, world_size: int | None, *, cuda: bool) -> list[Mistake]:
    """Every broken rule; without `world_size` those that hold for any number of ranks."""
    return [
        *(_ranks(options, world_size) if world_size is not None else ()),
        *_tensor(options, shape),
        *_context(options, shape),
        *_pipeline(options, shape),
        *_experts(options, shape),
        *_recompute(options, shape, cuda),
        *_optimizer(options),
        *_device(options, cuda),
    ]


def _broken(field: str, value: object, reason: str, fix: str) -> Mistake:
    return wrong_value(f"trainer.backend_options.{field}", value, reason, f"{fix}.")


def _ranks(o: MegatronOptions, world_size: int) -> Iterator[Mistake]:
    dense = o.ranks_of_a_model
    if world_size % dense:
        yield _broken(
            "tensor_parallel",
            o.tensor_parallel,
            f"tensor {o.tensor_parallel} · pipeline {o.pipeline_parallel} · context {o.context_parallel} = {dense} "
            f"does not divide the trainer's {world_size} ranks",
            f"start a multiple of {dense} ranks, or choose sizes whose product divides {world_size}",
        )
    experts = o.ranks_of_all_experts
    if world_size % experts:
        yield _broken(
            "expert_parallel",
            o.expert_parallel,
            f"expert tensor {o.expert_tensor_size} · expert {o.expert_parallel} · pipeline {o.pipeline_parallel} = "
            f"{experts} does not divide the trainer's {world_size} ranks",
            f"start a multiple of {experts} ranks, or choose sizes whose product divides {world_size}",
        )


def _tensor(o: MegatronOptions, s: ModelShape) -> Iterator[Mistake]:
    size = o.tensor_parallel
    divided = {"attention heads": s.heads, "hidden size": s.hidden, "feed-forward size": s.ffn}
    if s.recurrence is not None:
        divided["key heads of linear attention"] = s.recurrence.key_heads
    if s.experts is not None and s.experts.shared_ffn is not None:
        divided["size of the shared experts"] = s.experts.shared_ffn
    for what, count in divided.items():
        if count % size:
            fix = f"choose a divisor of {count}"
            yield _broken("tensor_parallel", size, f"the model's {what}, {count}, do not divide by it", fix)
    rows = s.padded_vocabulary(size) // size
    if s.vocabulary <= rows * (size - 1):
        reason = f"of {s.vocabulary} tokens, {rows} to a rank, none would be left for the last rank"
        yield _broken("tensor_parallel", size, reason, "choose a smaller size")
    groups = s.key_value_heads
    if groups % size and size % groups:
        reason = f"it neither divides the model's {groups} key-value heads nor is a multiple of them"
        yield _broken("tensor_parallel", size, reason, f"choose a divisor or a multiple of {groups}")
    elif s.gated and size > groups:
        reason = f"megatron-core cannot divide the gates of the model's {groups} key-value heads over more ranks"
        yield _broken("tensor_parallel", size, reason, f"choose a divisor of {groups}")


def _pipeline(o: MegatronOptions, s: ModelShape) -> Iterator[Mistake]:
    stages, chunks = o.pipeline_parallel, o.virtual_pipeline
    if stages == 1:
        for field in ("first_stage_layers", "last_stage_layers"):
            if (value := getattr(o, field)) is not None:
                yield _broken(field, value, "there is one pipeline stage", "leave it out, or raise pipeline_parallel")
        if chunks > 1:
            yield _broken("virtual_pipeline", chunks, "there is one pipeline stage", "raise pipeline_parallel to 2")
        return
    fixed = [count for count in (o.first_stage_layers, o.last_stage_layers) if count is not None]
    middle, rest = stages - len(fixed), s.layers - sum(fixed)
    sum_text = f"{s.layers} layers" + "".join(f" - {count}" for count in fixed)
    if rest < middle or (middle == 0 and rest != 0) or (middle and rest % middle):
        yield _broken(
            "pipeline_parallel",
            stages,
            f"{sum_text} = {rest} do not divide evenly over {middle} stages",
            "set first_stage_layers and last_stage_layers so that the stages between them share the rest evenly",
        )
        return
    counts = {*fixed, *([rest // middle] if middle else [])}
    for count in sorted(counts):
        if count % chunks:
            reason = f"a stage has {count} layers, which do not divide into {chunks} chunks"
            yield _broken("virtual_pipeline", chunks, reason, f"choose a divisor of {count}")


def _experts(o: MegatronOptions, s: ModelShape) -> Iterator[Mistake]:
    if s.experts is None:
        if o.expert_parallel > 1:
            yield _broken("expert_parallel", o.expert_parallel, f"{s.architecture} has no experts", "set it to 1")
        return
    count = s.experts.count
    if o.expert_parallel > count:
        reason = f"the model has {count} experts a layer, so some ranks would hold none"
        yield _broken("expert_parallel", o.expert_parallel, reason, f"choose a divisor of {count}")
    elif count % o.expert_parallel:
        reason = f"the model's {count} experts do not divide by it"
        yield _broken("expert_parallel", o.expert_parallel, reason, f"choose a divisor of {count}")
    if s.experts.ffn % o.expert_tensor_size:
        reason = f"an expert's feed-forward size, {s.experts.ffn}, does not divide by it"
        yield _broken("expert_tensor_parallel", o.expert_tensor_size, reason, f"choose a divisor of {s.experts.ffn}")
    if o.tensor_parallel > 1 and not o.sequence_parallel:
        reason = "with experts, tensor-parallel ranks must split the tokens, or each would route all of them"
        yield _broken("sequence_parallel", o.sequence_parallel, reason, "set it to true")
    if o.expert_parallel == 1 and o.expert_tensor_size != o.tensor_parallel:
        reason = "without expert parallelism megatron-core reduces the experts' gradients as those of other layers"
        fix = f"set it to {o.tensor_parallel}, or raise expert_parallel"
        yield _broken("expert_tensor_parallel", o.expert_tensor_size, reason, fix)
    if o.experts.load_balancing == "none" and o.experts.aux_loss_coefficient:
        reason = "load_balancing is none, so nothing uses it"
        yield _broken("experts.aux_loss_coefficient", o.experts.aux_loss_coefficient, reason, "set load_balancing")
    if o.experts.bias_update_rate and not s.experts.bias:
        reason = f"the routers of {s.architecture} have no bias"
        yield _broken("experts.bias_update_rate", o.experts.bias_update_rate, reason, "set it to 0")


def _recompute(o: MegatronOptions, s: ModelShape, cuda: bool) -> Iterator[Mistake]:
    r = o.recompute
    if r.granularity == "selective":
        needs = {
            "mla_up_proj": (s.latent is not None, f"{s.architecture} has no latent attention"),
            "moe": (s.experts is not None, f"{s.architecture} has no experts"),
            "moe_act": (s.experts is not None and cuda, "it needs grouped experts: Transformer Engine on a GPU"),
            "shared_experts": (s.experts is not None and s.experts.shared_ffn is not None, "no shared experts"),
        }
        for module in r.modules:
            fits, reason = needs.get(module, (True, ""))
            if not fits:
                yield _broken("recompute.modules", module, reason, "leave it out")
    most = max(s.layers // (o.pipeline_parallel * o.virtual_pipeline), 1)
    if r.granularity == "full" and r.layers > most:
        yield _broken("recompute.layers", r.layers, f"a stage's chunk has about {most} layers", f"at most {most}")


def _optimizer(o: MegatronOptions) -> Iterator[Mistake]:
    if o.optimizer_offload_fraction and not o.distributed_optimizer:
        reason = "only the distributed optimizer keeps its float32 weights in host memory"
        fix = "set distributed_optimizer to true, or leave this out"
        yield _broken("optimizer_offload_fraction", o.optimizer_offload_fraction, reason, fix)
    if o.optimizer_moments == "bfloat16" and (o.optimizer_offload_fraction or not o.distributed_optimizer):
        reason = "only the distributed optimizer on the GPU keeps them so"
        fix = "set distributed_optimizer to true and optimizer_offload_fraction to 0, or leave this out"
        yield _broken("optimizer_moments", "bfloat16", reason, fix)


def _context(o: MegatronOptions, shape: ModelShape) -> Iterator[Mistake]:
    """Nothing has compared latent attention that is divided over ranks with the whole. A recurrence needs all tokens
    of its sequence in order."""
    if o.context_parallel > 1 and shape.recurrence is not None:
        reason = f"{shape.architecture} has layers of linear attention, whose state runs through the whole sequence"
        fix = "leave it out; tensor_parallel and recompute lower the memory of long sequences too"
        yield _broken("context_parallel", o.context_parallel, reason, fix)
    if o.context_parallel > 1 and shape.latent is not None:
        reason = f"{shape.architecture} has latent attention, which was never run in parts of a sequence"
        fix = "leave it out; tensor_parallel and recompute lower the memory of long sequences too"
        yield _broken("context_parallel", o.context_parallel, reason, fix)


def _device(o: MegatronOptions, cuda: bool) -> Iterator[Mistake]:
    if cuda:
        return
    fix = "leave it out, or run on GPUs with Transformer Engine"
    if o.experts.dispatcher == "deepep":
        yield _broken("experts.dispatcher", "deepep", "DeepEP needs a GPU", "set it to auto or alltoall")
    if o.optimizer_moments == "bfloat16":
        yield _broken("optimizer_moments", "bfloat16", "Transformer Engine's Adam, which does that, needs a GPU", fix)
    for field in ("optimizer_offload_fraction", "offload_optimizer"):
        if value := getattr(o, field):
            yield _broken(field, value, "there is no device memory to spare", fix)
