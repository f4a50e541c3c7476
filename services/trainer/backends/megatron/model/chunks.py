"""The chunks of the model on this rank: megatron-core's GPT with a head that scores tokens, and their parameters in
host memory while the model is not used."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from millrace.megatron.architectures.shape import ModelShape, Rope
from millrace.megatron.topology import Topology
from services.trainer.backends.head import VocabularyPart, WantedTokens, scores
from services.trainer.backends.megatron.model.layers import block
from services.trainer.backends.megatron.packing import PackedTokens


class RestingParameters:
    """The parameters and buffers of chunks, which can be moved to host memory and back. The tensors stay the same, and
    so do their views: only the memory below them is freed and allocated again, so its address may be another
    afterwards."""

    def __init__(self, chunks: Iterable[nn.Module]) -> None:
        tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        self._storages: dict[int, Any] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage
        self._copies: dict[int, torch.Tensor] = {}
        """Host memory for each storage, which is kept for the next time."""
        self._resting = False

    @property
    def host_copies(self) -> list[torch.Tensor]:
        """The host memory that is kept for them."""
        return list(self._copies.values())

    def rest(self) -> None:
        """Moves the parameters to host memory."""
        if self._resting:
            return
        self._resting = True
        for key, storage in self._storages.items():
            on_device = _bytes(storage)
            if key not in self._copies:
                self._copies[key] = torch.empty(on_device.shape, dtype=torch.uint8, pin_memory=on_device.is_cuda)
            self._copies[key].copy_(on_device, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the memory must not be used again before it is copied
        for storage in self._storages.values():
            storage.resize_(0)

    def wake(self) -> None:
        """Moves them back."""
        if not self._resting:
            return
        self._resting = False
        for key, storage in self._storages.items():
            storage.resize_(self._copies[key].numel())
            _bytes(storage).copy_(self._copies[key], non_blocking=True)


def _bytes(storage: Any) -> torch.Tensor:
    """All of a storage as a tensor, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True)
class ChunkPlan:
    """What every chunk of a model is built from."""

    shape: ModelShape
    topology: Topology
    config: TransformerConfig
    device: torch.device


class AxisPositions(nn.Module):
    """Rotary positions of which each frequency turns by the time, the height or the width of a token. Megatron's own
    have one order of the frequencies, Qwen3-VL and Qwen3.5 the other."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        super().__init__()
        dim = int(head_dim * rope.fraction)
        even_f = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
        self.frequencies_f = 1.0 / rope.theta ** (even_f / dim)
        self.axes_f = torch.tensor(rope.axes(), device=device)

    def forward(self, positions: Tensor, *sections: Any, **unused: Any) -> Tensor:
        """Angles for positions [3, 1, P], float32 [P, 1, 1, 2 · frequencies]."""
        angles_pf = positions[self.axes_f, 0].t() * self.frequencies_f
        return torch.cat([angles_pf, angles_pf], 1)[:, None, None]


@functools.cache
def turn_whole_rows() -> None:
    """Lets attention turn all tokens of a packed row at once, each by its own angles, in models for images. Megatron's
    fused kernel for packed rows gives all sequences the same angles. Without the kernel Megatron cuts the row into its
    sequences, and waits for the device once for each of them in every layer."""
    turned = attention.apply_rotary_pos_emb

    def turn(heads_phd: Tensor, angles: Tensor, config: TransformerConfig, **more: Any) -> Tensor:
        if config.mrope_section is None or more.get("cu_seqlens") is None:
            found: Tensor = turned(heads_phd, angles, config, **more)
            return found
        whole: Tensor = turned(heads_phd[:, None], angles, config, **{**more, "cu_seqlens": None})
        return whole[:, 0]

    attention.apply_rotary_pos_emb = turn


class Policy(GPTModel):  # type: ignore[misc]  # megatron has no types
    """GPT whose `labels` are `WantedTokens`: then the last stage gives what `head.scores` does, float32 [2 + K, R].
    Without them it gives logits [1, P, vocabulary part], as GPT does."""

    def __init__(self, plan: ChunkPlan, chunk: int) -> None:
        shape, options = plan.shape, plan.topology.options
        stage = parallel_state.get_pipeline_model_parallel_rank()
        several = options.virtual_pipeline > 1
        mine = plan.topology.layers_of(stage, chunk, shape.layers)
        super().__init__(
            config=plan.config,
            transformer_layer_spec=block(plan.config, shape, mine, chunk if several else None),
            vocab_size=shape.padded_vocabulary(options.tensor_parallel),
            max_sequence_length=shape.context,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == options.pipeline_parallel - 1 and chunk == options.virtual_pipeline - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope" if plan.config.mrope_section is None else "mrope",
            rotary_base=shape.rope.theta,
            rotary_percent=shape.rope.fraction,
            vp_stage=chunk if several else None,
        )
        self.chunk_tokens = options.logprob_chunk_tokens
        self.vocabulary = _vocabulary(shape, options.tensor_parallel)
        if plan.config.mrope_section is not None:
            self.rotary_pos_emb = AxisPositions(shape.rope, shape.head_dim, plan.device)
            turn_whole_rows()
        if shape.latent is not None:
            self._set_latent_norms(shape.latent.norm_epsilon)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: None,
        *,
        packed_seq_params: PackedTokens,
        **rest: Any,
    ) -> Tensor:
        """What `_postprocess` gives, or on other stages the hidden states [P, 1, H], for the tokens [1, P] of a
        micro-batch. In a job with images the first stage has the features of its images, and every stage positions by
        time, height and width."""
        embedded_p1h = None
        if (seen := packed_seq_params.seen) is not None:
            # The features come first: the tower notes the grids of images, of which the positions are made.
            if self.pre_process and (shown := seen.features()) is not None:
                embedded_p1h = self.embedding(input_ids=input_ids, position_ids=None)
                places_n, features_fnh = self._of_this_rank(*shown, tokens=len(embedded_p1h))
                put_nh = features_fnh[0].to(embedded_p1h.dtype)
                embedded_p1h = embedded_p1h.index_copy(0, places_n, put_nh[:, None])
                packed_seq_params = packed_seq_params.adding(places_n, features_fnh[1:])
            position_ids = seen.positions
        hidden: Tensor = super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=embedded_p1h,
            packed_seq_params=packed_seq_params,
            **rest,
        )
        return hidden

    def _of_this_rank(self, places_n: Tensor, features_fnh: Tensor, *, tokens: int) -> tuple[Tensor, Tensor]:
        """The places and the features of the images' tokens that this rank has: all, or those among its `tokens`."""
        if not self.config.sequence_parallel:
            return places_n, features_fnh
        first = tokens * parallel_state.get_tensor_model_parallel_rank()
        mine_n = (places_n >= first) & (places_n < first + tokens)
        return places_n[mine_n] - first, features_fnh[:, mine_n]

    def _postprocess(self, *, hidden_states: Tensor, labels: WantedTokens | None = None, **rest: Any) -> Tensor:
        if labels is None or not self.post_process:
            logits: Tensor = super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)
            return logits
        shared = self.share_embeddings_and_output_weights
        weight_vh = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
        return scores(hidden_states[labels.positions_r, 0], weight_vh, labels, self.vocabulary, self.chunk_tokens)

    def _set_latent_norms(self, epsilon: float) -> None:
        """Sets the epsilon of the norms on latents; Megatron gives every norm the model's epsilon."""
        for module in self.modules():
            if isinstance(module, MLASelfAttention):
                for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                    if hasattr(getattr(module, name, None), "eps"):
                        getattr(module, name).eps = epsilon


class ValueHead(nn.Module):
    """A linear layer with one output, complete on every rank of the last stage, with initial weights 0."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, hidden_rh: Tensor) -> Tensor:
        """Values, float32 [R]."""
        values_r: Tensor = (hidden_rh @ self.weight[0]).float()
        return values_r


class ValueModel(Policy):
    """The decoder with a value head. Its last stage returns values and zeros if that of a policy returns
    log-probabilities and entropies, so that both use the same pipeline."""

    def __init__(self, plan: ChunkPlan, chunk: int) -> None:
        super().__init__(plan, chunk)
        if self.post_process:
            self.output_layer = ValueHead(plan.shape.hidden, plan.config.params_dtype)

    def _postprocess(self, *, hidden_states: Tensor, labels: WantedTokens | None = None, **rest: Any) -> Tensor:
        if labels is None or not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # Every rank computes all values, so a rank's share of the gradient is a slice of the whole gradient.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        values_r = self.output_layer(hidden_states[labels.positions_r, 0])
        return torch.stack([values_r, torch.zeros_like(values_r)])


def build_chunks(plan: ChunkPlan) -> list[Policy]:
    """A module for each chunk of this rank, on the device, with uninitialized weights."""
    kind = ValueModel if plan.shape.value_head else Policy
    chunks = [kind(plan, chunk) for chunk in range(plan.topology.options.virtual_pipeline)]
    return [chunk.to(plan.device) for chunk in chunks]


def _vocabulary(shape: ModelShape, parts: int) -> VocabularyPart:
    rows = shape.padded_vocabulary(parts) // parts
    start = rows * parallel_state.get_tensor_model_parallel_rank()
    group = parallel_state.get_tensor_model_parallel_group() if parts > 1 else None
    return VocabularyPart(start, max(0, min(rows, shape.vocabulary - start)), group)
