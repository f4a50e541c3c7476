"""The fsdp2 backend: float32 master weights and AdamW, sharded; forward and backward in the job's dtype."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from millrace.backends import FIELD
from millrace.backends.fsdp2 import Fsdp2Options, parse
from millrace.data.pictures import Pictures
from millrace.errors import InvalidJob, refused
from millrace.fsdp2.sequence_parallel import check_role
from millrace.memory.ledger import Part
from millrace.spec import JobSpec
from millrace.spec.trainer import Role
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from services.trainer.backends.fsdp2 import attention, head, published, recurrent
from services.trainer.backends.fsdp2.adapted import ModuleAdapter, adapters_off
from services.trainer.backends.fsdp2.computable import check_config
from services.trainer.backends.fsdp2.critic import Fsdp2Critic
from services.trainer.backends.fsdp2.flops import sequence_cost
from services.trainer.backends.fsdp2.head import token_scores
from services.trainer.backends.fsdp2.model import FIELD as MODEL_FIELD
from services.trainer.backends.fsdp2.model import Sharding, decoder_layers, load_config, policy
from services.trainer.backends.fsdp2.published import export, manifest, parts
from services.trainer.backends.fsdp2.sequence_parallel import RankTokens, SequenceGroup, divide_ranks, group_of_role
from services.trainer.backends.fsdp2.sharded_model import ShardedModel, reset_sharding
from services.trainer.backends.head import WantedTokens
from services.trainer.backends.tower import Tower, TowerInputs, TrainedTower
from services.trainer.protocol.backend import LossFn, Output, TokenScores
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives

log = structlog.get_logger(__name__)

ATTENTION_FIELD = f"{FIELD}.attention"
CHECKED = 8
"""Tokens that are scored in two ways when a model is built."""


def build(spec: JobSpec, device: torch.device) -> "Fsdp2Backend":
    """The backend with its model loaded. Raises InvalidJob, on every rank, for a model or options that it cannot
    run."""
    options = parse(spec.trainer.backend_options)
    return Fsdp2Backend(spec, options, device, _mesh(options, device, FIELD))


def _mesh(options: Fsdp2Options, device: torch.device, field: str) -> DeviceMesh:
    """The ranks as groups that share one sharded copy each. Raises InvalidJob about `field`, which has the options."""
    ranks = dist.get_world_size()
    size = options.fsdp_size or ranks
    for name, group in (("fsdp_size", size), ("sequence_parallel_size", options.sequence_parallel_size)):
        if ranks % group:
            reason = f"{ranks} ranks do not divide into groups of {group}"
            raise refused(f"{field}.{name}", group, reason, "choose a divisor of the number of ranks.")
    if size == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shards",))
    return init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("copies", "shards"))


class Fsdp2Backend(ShardedModel):
    """Implements `services.trainer.protocol.backend.Backend`. Ranks are data parallel, in groups that share each
    micro-batch."""

    def __init__(self, spec: JobSpec, options: Fsdp2Options, device: torch.device, mesh: DeviceMesh) -> None:
        compute = getattr(torch, spec.trainer.dtype)
        with collectives.fail_together():
            config = load_config(spec.model)
            chosen = _attention(options, config.get_text_config(), compute, device)
            check_config(spec, options, config, spec.model.path, MODEL_FIELD)
        self.device = device
        self._sequence, self.data_parallel = divide_ranks(options.sequence_parallel_size)
        self._reference_sequence = self._sequence
        sharding = Sharding(
            mesh,
            chosen,
            compute,
            self._sequence,
            offload=options.offload_parameters,
            compile=_compiles(options, device),
            with_tower=spec.trainer.train_tower,
        )
        self._attention = sharding.attention
        self._rank = mesh.get_rank()
        self.adapter: ModuleAdapter | None = None
        self._merging: published.MergedLayers | None = None
        self._dropout = False
        model: Any = self._policy(spec, config, sharding, options)
        self._recurrent = bool(recurrent.layers(model))
        self._tower: TowerInputs | None = None
        if spec.data.images is not None:
            with collectives.fail_together():
                pictures = Pictures.of_folder(spec.model.path)
                kind = TrainedTower if sharding.with_tower else Tower
                self._tower = kind(spec.model, config, pictures, compute, device)
        if spec.trainer.activation_recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._shards: dict[str, Memory | None] = {}
        self._reference: PreTrainedModel | None = None
        reference = parse(spec.trainer.of("reference").backend_options)
        if spec.algorithm.kl is not None and self.adapter is None:
            own = _role_sharding(sharding, reference, "reference")
            self._reference_sequence = own.sequence
            self._reference = policy(spec.model, config, own, dtype=compute).requires_grad_(False)
        self._reference_weights: list[Tensor] = [] if self._reference is None else list(self._reference.parameters())
        super().__init__(
            model,
            spec.trainer.optimizer,
            device,
            offload_optimizer=options.offload_optimizer,
            sums=sharding.sums,
        )
        self._chunked = self._scores_in_chunks(options.logprob_chunk_tokens, reference.logprob_chunk_tokens)
        if options.offload_activations:
            self.offload_activations(decoder_layers(self._model))
        self.parameters = sum(parameter.numel() for parameter in self._trained.values())
        self.cost = sequence_cost(config, self._model)
        self.critic: Fsdp2Critic | None = None
        if spec.algorithm.critic is not None:
            as_critic = spec.model_copy(update={"trainer": spec.trainer.of("critic")})
            own_options = parse(as_critic.trainer.backend_options)
            own = _role_sharding(sharding, own_options, "critic")
            self.critic = Fsdp2Critic(as_critic, own, own_options, config.get_text_config().vocab_size)

    def _policy(self, spec: JobSpec, config: Any, sharding: Sharding, options: Fsdp2Options) -> PreTrainedModel:
        if (chosen := spec.model.lora) is None:
            return policy(spec.model, config, sharding, dtype=torch.float32)
        from services.trainer.backends.fsdp2 import lora  # importing PEFT takes seconds
        from services.trainer.backends.lora import configuration, settings_of

        with collectives.fail_together():
            described = configuration(chosen)
        model = lora.policy(spec.model, config, described, sharding, spec.trainer.seed)
        self._dropout = chosen.dropout > 0
        settings = settings_of(described)
        parted = parts(model, settings, self.device, self._rank)
        self._merging = published.MergedLayers(settings.scale, self.device)
        self.adapter = ModuleAdapter(model, settings, described, self._rank, parted)
        return model

    def logprobs(
        self, microbatches: Sequence[MicroBatch], *, temperature: float, reference: bool = False
    ) -> list[Tensor]:
        model, without_adapter = self._model, reference and self.adapter is not None
        if reference and not without_adapter:
            model = self._reference
        assert model is not None, "a reference policy is kept only for a job with algorithm.kl"
        sequence = self._reference_sequence if reference and not without_adapter else self._sequence
        mine = sequence.turns.mine(microbatches)
        with adapters_off(model) if without_adapter else nullcontext():
            scores = self._forward(model, sequence, mine, temperature)
        return sequence.turns.everyones([each.logprobs_r for each in scores], microbatches)

    def scores(self, microbatches: Sequence[MicroBatch], *, temperature: float) -> list[TokenScores]:
        return self._forward(self._model, self._sequence, microbatches, temperature)

    @torch.no_grad()
    def _forward(
        self, model: nn.Module, sequence: SequenceGroup, microbatches: Sequence[MicroBatch], temperature: float
    ) -> list[TokenScores]:
        with self._without_dropout():
            scores = [self._scores(model, sequence, batch.without_others(), temperature) for batch in microbatches]
        model.reshard()  # type: ignore[operator]  # the root waits for a backward pass, which does not come
        return scores

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """A policy samples without dropout, so its log-probabilities are computed without."""
        if self._dropout:
            self._model.eval()
        try:
            yield
        finally:
            if self._dropout:
                self._model.train()

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], loss_fn: LossFn[Output], *, temperature: float, more: bool = False
    ) -> list[Output]:
        outputs = []
        for batch in self.with_gradients_added_up(microbatches, more=more):
            scores = self._scores(self._model, self._sequence, batch, temperature)
            try:
                loss, output = loss_fn(batch, scores)
            except InvalidJob:  # a user's own loss: the job may continue once it is fixed
                self._model.reshard()  # the root waits for a backward pass, as above
                raise
            loss.backward()
            outputs.append(output)
        return outputs

    def _scores(self, model: nn.Module, sequence: SequenceGroup, batch: MicroBatch, temperature: float) -> TokenScores:
        tokens = sequence.tokens(batch, self.device)
        with sequence.own_random_numbers(self.device) if self._dropout else nullcontext():
            score = self._from_hidden_states if self._chunked else self._from_logits
            scores_kr = sequence.whole_scores(score(model, tokens, temperature), tokens)
        return TokenScores.of(scores_kr)

    def _from_hidden_states(self, model: nn.Module, tokens: RankTokens, temperature: float) -> Tensor:
        """What `head.scores` gives for the tokens that this rank scores, [2 + K, R of this rank]."""
        wanted = WantedTokens(tokens.positions_r, tokens.targets_r, temperature, tokens.others_rk)
        scores_kr: Tensor = model(wanted=wanted, **self._inputs(tokens))
        return scores_kr

    def _from_logits(self, model: nn.Module, tokens: RankTokens, temperature: float) -> Tensor:
        """The same from the model's logits, which exist for all these tokens at a time."""
        logits_1rv = model(logits_to_keep=tokens.positions_r, **self._inputs(tokens)).logits
        return token_scores(logits_1rv[0], tokens.targets_r, temperature, tokens.others_rk)

    def _scores_in_chunks(self, *chunk_tokens: int) -> bool:
        """Whether token scores can be computed from hidden states, see `head`. `chunk_tokens`: of policy and
        reference."""
        reason = head.obstacle(self._model)
        if reason is None:
            models = [model for model in (self._model, self._reference) if model is not None]
            for model, tokens in zip(models, chunk_tokens, strict=False):
                head.install(model, tokens)
            reason = None if self._scored_alike() else "from its hidden states they come out differently"
        if reason is not None and self._rank == 0:
            model_type = self._model.config.model_type
            log.warning("token scores need the logits of a whole micro-batch", model_type=model_type, reason=reason)
        return reason is None

    def _scored_alike(self) -> bool:
        """Scores a few tokens in both ways: a model may change its logits in more ways than its config says."""
        batch = MicroBatch((0,), (CHECKED,), (CHECKED - 1,), torch.arange(CHECKED))
        tokens = self._sequence.tokens(batch, self.device)
        with torch.no_grad(), self._without_dropout():
            expected_2r = self._sequence.whole_scores(self._from_logits(self._model, tokens, 1.0), tokens)
            scores_2r = self._sequence.whole_scores(self._from_hidden_states(self._model, tokens, 1.0), tokens)
        self._model.reshard()
        return head.agrees(scores_2r, expected_2r[0])

    def _inputs(self, tokens: RankTokens) -> dict[str, Any]:
        inputs = attention.model_inputs(self._attention, tokens, self.device, recurrent=self._recurrent)
        return inputs if self._tower is None else {**inputs, **self._tower.inputs(tokens.whole)}

    @property
    def tower_flops(self) -> float:
        return 0.0 if self._tower is None else self._tower.flops

    def manifest(self, dtype: str) -> Manifest:
        return manifest(self._model, dtype)

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        whole = export(self._model, dtype, self._rank, self.adapter)
        return ((info, None if tensor is None else tensor.to(self.device)) for info, tensor in whole)

    def rest(self) -> None: ...

    def shards(self, dtype: str) -> Memory | None:
        if dtype not in self._shards:
            self._shards[dtype] = published.shards(self._model, dtype, self.device, merging=self._merging)
        if self._merging is not None:
            self._merging.refresh()
        return self._shards[dtype]

    def abandon_pass(self) -> None:
        if self._reference is not None:
            reset_sharding(self._reference)
        super().abandon_pass()

    def held(self) -> dict[Part, list[Tensor]]:
        held = super().held()
        if self._tower is not None:
            held[Part.WEIGHTS] = [*held[Part.WEIGHTS], *self._tower.weights]
        return {**held, Part.REFERENCE: self._reference_weights}

    def metrics(self) -> dict[str, float]:
        return {}


def _attention(options: Fsdp2Options, config: Any, compute: torch.dtype, device: torch.device) -> str:
    """Name in transformers of the attention that the job uses, for a model with this config (of the text part)."""
    varlen, flash4 = (fits(config, compute, device) for fits in (attention.varlen_fits, attention.flash4_fits))
    if options.attention == "auto":
        if flash4:
            return attention.FLASH4
        flash2 = is_flash_attn_2_available() and options.sequence_parallel_size == 1
        return attention.FLASH2 if flash2 else attention.VARLEN if varlen else attention.SEGMENTS
    if options.attention == "varlen" and not varlen:
        reason = "torch's kernel needs a GPU, bfloat16 or float16, heads of at most 256 and no latent attention"
        raise refused(ATTENTION_FIELD, options.attention, reason, "leave the option out.")
    if options.attention == attention.FLASH2 and not is_flash_attn_2_available():
        reason = "flash-attn is not installed here"
        raise refused(ATTENTION_FIELD, options.attention, reason, "install it on every trainer host, or leave it out.")
    if options.attention == "flash_attention_4" and not flash4:
        needed = "flash-attn-4, a Hopper or Blackwell GPU, bfloat16 or float16, and no latent attention"
        reason = f"it needs {needed}; heads have a multiple of 8 and at most 256 dimensions, 128 on Blackwell"
        raise refused(ATTENTION_FIELD, options.attention, reason, "leave the option out.")
    return attention.OWN.get(options.attention, options.attention)


def _role_sharding(policy: Sharding, options: Fsdp2Options, role: Role) -> Sharding:
    """How the reference or the critic, which has these options, is sharded beside the policy."""
    device = torch.device(policy.mesh.device_type)
    mesh = _mesh(options, device, f"trainer.{role}.backend_options")
    check_role(policy.sequence.size, options, role)
    return replace(
        policy,
        mesh=policy.mesh if mesh.shape == policy.mesh.shape else mesh,
        sequence=group_of_role(policy.sequence, options.sequence_parallel_size),
        offload=options.offload_parameters,
        compile=_compiles(options, device),
    )


def _compiles(options: Fsdp2Options, device: torch.device) -> bool:
    if options.compile_layers is not None:
        return options.compile_layers
    return device.type == "cuda" and any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang"))
