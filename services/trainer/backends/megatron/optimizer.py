"""Data parallelism and the optimizer.

Megatron's gradient buffers, its (distributed) Adam with float32 master weights, and the norm of the gradients over the
parts of the model on all ranks.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from millrace.backends.megatron import MegatronOptions
from millrace.errors import InvalidState
from millrace.memory.ledger import Part
from millrace.spec.trainer import Optimizer
from services.trainer.backends.megatron import master_weights
from services.trainer.backends.megatron.master_weights import OwnedRange
from services.trainer.backends.megatron.model.chunks import Policy


def wrap(chunks: list[Policy], options: MegatronOptions) -> list[DistributedDataParallel]:
    """The chunks in data-parallel wrappers, which hold the gradients."""
    config = chunks[0].config
    cuda = torch.cuda.is_available()
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=options.distributed_optimizer,
        overlap_grad_reduce=cuda,
        overlap_param_gather=False,
    )
    wrapped = []
    for index, chunk in enumerate(chunks):
        wrapped.append(DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0))
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):  # Transformer Engine's linear layers
                trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
                module.fuse_wgrad_accumulation = options.fused_gradients and trained
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        several = len(wrapped) > 1
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if several else wrapped[0].no_sync
    return wrapped


class Updater:
    """Megatron's optimizer. The trainer clips: it gives the factor by which gradients are scaled."""

    def __init__(self, chunks: list[DistributedDataParallel], chosen: Optimizer, options: MegatronOptions) -> None:
        self._chunks = chunks
        config = chunks[0].config
        offload = options.optimizer_offload_fraction > 0
        self._optimizer: ChainedOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=chosen.lr,
                min_lr=chosen.lr,
                weight_decay=chosen.weight_decay,
                adam_beta1=chosen.betas[0],
                adam_beta2=chosen.betas[1],
                adam_eps=chosen.eps,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=options.distributed_optimizer,
                optimizer_cpu_offload=offload,
                optimizer_offload_fraction=options.optimizer_offload_fraction,
                overlap_cpu_optimizer_d2h_h2d=offload,
                # Without it the float32 weights of offloaded parameters would be on the device and on the host.
                use_precision_aware_optimizer=offload or options.optimizer_moments != "float32",
                exp_avg_dtype=getattr(torch, options.optimizer_moments),
                exp_avg_sq_dtype=getattr(torch, options.optimizer_moments),
                store_param_remainders=False,
                clip_grad=0.0,
            ),
            chunks,
            config_overrides={},  # weight decay for all parameters, as in the other backends
            use_gloo_process_groups=False,
        )
        self._options = options
        self._ready = False
        self.has_gradients = False
        """Whether there has been a backward pass since the last update."""
        self._reduced = False
        """Whether its gradients are summed over the ranks."""
        self._resting = False
        self._in_host_memory: list[Tensor] = []
        """What `_rest` has moved there."""
        self._biases: list[tuple[Tensor, Tensor]] = []
        """The biases of routers, each with a copy from before the backward pass that changes it."""
        self.updates = 0
        for part in self.parts:
            master_weights.create_master_weights(part)
        self.zero()

    @property
    def parts(self) -> list[MegatronOptimizer]:
        """The optimizer of the dense parameters, and that of the experts if this rank has any."""
        return [part for part in self._optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]

    @contextmanager
    def adding_gradients(self, *, more: bool) -> Iterator[None]:
        """Prepares for a backward pass. The end of a pass without `more` sums the gradients of all passes over the
        ranks, so it is the last one for an update. Raises InvalidState for a pass after it."""
        if self._reduced:
            raise InvalidState(
                "there are gradients already, summed over the ranks.", "step the optimizer or clear them first."
            )
        if not self.has_gradients:
            self._wake()
            self._biases = [(bias, bias.clone()) for bias in self._router_biases()]
        self.has_gradients, self._reduced = True, not more
        with self._kept_on_each_rank() if more else nullcontext():
            yield

    @contextmanager
    def _kept_on_each_rank(self) -> Iterator[None]:
        """Backward passes inside neither sum gradients over the ranks nor finish them: these stay in the buffers, to
        which later passes add."""
        config = self._chunks[0].config
        kept = config.finalize_model_grads_func, config.no_sync_func
        config.finalize_model_grads_func = config.no_sync_func = None
        try:
            with ExitStack() as stack:
                for chunk in self._chunks:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            config.finalize_model_grads_func, config.no_sync_func = kept

    def norm(self) -> float:
        """Norm of the gradients of all parameters, each counted once; the same on every rank."""
        self._prepare()
        squares = {False: 0.0, True: 0.0}
        for part in self.parts:
            gradients = _gradients_for_norm(part)
            of_experts = part.param_groups[0]["is_expert_parallel"]
            squares[of_experts] += _square(gradients)
        return math.sqrt(sum(_summed(square, self._norm_group(experts)) for experts, square in squares.items()))

    def make_moments(self) -> None:
        """Allocates the moments that the first update would allocate: of an optimizer all of them, or none."""
        for part in self.parts:
            master_weights.make_moments(part)

    def step(self, *, lr: float, gradient_scale: float) -> None:
        """Multiplies the gradients by the scale, updates the weights and clears the gradients."""
        self._prepare()
        for part in self.parts:
            if gradients := [g for parameter in part.get_parameters() if (g := _gradient(parameter)) is not None]:
                torch._foreach_mul_(gradients, gradient_scale)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step_with_ready_grads()
        self.updates += 1
        self._biases = []
        self.zero()

    def zero(self) -> None:
        """Clears the gradients. If no step was made, the biases of routers, which the end of a backward pass
        changes, are restored."""
        for bias, before in self._biases:
            bias.copy_(before)
        self._biases = []
        if self.has_gradients:  # counts of a pass that was not finished
            reset_model_temporary_tensors(self._chunks[0].config, self._chunks)
        if not self._resting:
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            self._rest()
        self._ready = self._reduced = self.has_gradients = False

    def _router_biases(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from (buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias"))

    def _rest(self) -> None:
        """Frees memory until the next backward pass, as the job says."""
        self._resting = True
        if self._options.offload_optimizer:
            self._in_host_memory = [tensor for part in self.parts for tensor in master_weights.to_host(part)]
        if self._options.frees_gradients:
            for chunk in self._chunks:
                chunk.offload_grad_buffers()

    def _wake(self) -> None:
        """Restores what `_rest` freed."""
        if self._options.frees_gradients and self._resting:
            for chunk in self._chunks:
                chunk.restore_grad_buffers()
        if self._options.offload_optimizer and self._resting:
            master_weights.to_device(self._in_host_memory)
            self._in_host_memory = []
        self._resting = False

    def held(self) -> dict[Part, list[Tensor]]:
        """The buffers of the gradients, and the tensors of the optimizer."""
        buffers = [buffer for chunk in self._chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        owned = list(self.owned_ranges())
        moments = [value for each in owned for value in each.inner.state.get(each.key, {}).values()]
        tensors = [each.master for each in owned] + [value for value in moments if isinstance(value, Tensor)]
        return {Part.GRADIENTS: [buffer.grad_data for buffer in buffers], Part.OPTIMIZER: tensors}

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """The ranges of all parameters whose optimizer state this rank keeps."""
        for part in self.parts:
            yield from master_weights.owned_ranges(part)

    def master_weights_changed(self) -> None:
        """Copies the master weights to the parameters on every rank, after they were written from outside."""
        for part in self.parts:
            master_weights.copy_to_parameters(part)
        if self._chunks[0].ddp_config.use_distributed_optimizer:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    def make_room(self, updates: int) -> None:
        """Sets the moments to 0 and the number of updates to `updates`, for a checkpoint to be read into."""
        self.updates = updates
        for part in self.parts:
            master_weights.make_room(part, updates)

    def _prepare(self) -> None:
        """Copies the gradients to the master weights, once after each backward pass."""
        if not self._ready:
            self._optimizer.prepare_grads()
            self._ready = True

    def _norm_group(self, experts: bool) -> dist.ProcessGroup:
        """The ranks over which squared gradients are summed."""
        group: dist.ProcessGroup
        if self._chunks[0].ddp_config.use_distributed_optimizer:
            group = parallel_state.get_intra_distributed_optimizer_instance_group()
        elif experts:
            group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        else:
            group = parallel_state.get_model_parallel_group()
        return group


def _summed(value: float, group: dist.ProcessGroup) -> float:
    total = torch.tensor([value], dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(total, group=group)
    return float(total)


def _gradients_for_norm(part: MegatronOptimizer) -> list[Tensor]:
    """The gradients that count on this rank. megatron-core 0.19 has another name for the method of 0.16."""
    find = getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm
    gradients: list[Tensor] = find()
    return gradients


def _square(gradients: list[Tensor]) -> float:
    """Sum of the squares of all gradients."""
    if not gradients:
        return 0.0
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
    return float(norms.double().square().sum())


def _gradient(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter: Megatron keeps it in another attribute if its dtype is another."""
    beside: Tensor | None = getattr(parameter, "decoupled_grad", None)
    return beside if beside is not None else parameter.grad
