"""Hugging Face Transformers as the engine of a pool: language models and sequence-classification models."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from millrace.data.model_folder import context
from millrace.engines import ENGINES
from millrace.validation.mistakes import options as checked_options
from millrace.wire.arrays import TokenScores
from services.rollout.engine import EngineDied, PoolModel, TokenSequence

if TYPE_CHECKING:
    from torch import Tensor

Answer = TypeVar("Answer")
CHUNK_BYTES = 64 << 20
"""Size of one float32 chunk of logits."""


class Options(BaseModel):
    """`engine_options` of a pool for this engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = ""
    """cpu, cuda, cuda:1; empty takes the first GPU if there is one."""
    attn_implementation: str = "sdpa"


class TransformersPool:
    """A Hugging Face model in this process, as every task of a pool has it."""

    name = "transformers"

    def __init__(self) -> None:
        self.release = ENGINES["transformers"].software.release
        self.device = ""
        self.world_size = 1
        self.at_once = 1
        self.context: int | None = None
        self.vocabulary = 0
        self._model: Any = None

    def _load(self, model: PoolModel, options: Options) -> None:
        """Loads the model, and notes what it is. Raises InvalidJob."""
        from services.rollout.engines.transformers.model import device_name, load

        self._model = load(model, options.device, options.attn_implementation)
        self.device = device_name(self._model)
        self.context = context(Path(model.pool.path))
        self.vocabulary = int(self._model.get_input_embeddings().weight.shape[0])


class TransformersScoring(TransformersPool):
    """See `ScoringEngine`."""

    def __init__(self) -> None:
        super().__init__()
        self._spec: PoolModel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")

    async def start(self, model: PoolModel) -> None:
        await self._in_turn(self._build, model)

    async def stop(self) -> None:
        await self._in_turn(self._forget)
        self._thread.shutdown(wait=False)

    async def score_tokens(self, sequences: Sequence[TokenSequence], top: int) -> list[TokenScores]:
        return await self._in_turn(self._score_tokens, sequences, top)

    async def rewards(self, sequences: Sequence[NDArray[np.int32]]) -> list[float]:
        return await self._in_turn(self._rewards, sequences)

    async def _in_turn(self, compute: Callable[..., Answer], *arguments: Any) -> Answer:
        """The answer of a function that is called in the engine's only thread. Raises EngineDied for what torch
        raises."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, compute, *arguments)
        except RuntimeError as error:
            fix = "lower the pool's batch_tokens if memory ran out."
            raise EngineDied(f"the model of the pool failed: {error}", fix) from error

    def _build(self, model: PoolModel) -> None:
        self._load(model, checked_options(Options, model.pool.engine_options, f"{model.field}.engine_options"))
        self._spec = model

    def _forget(self) -> None:
        self._model = None

    def _score_tokens(self, sequences: Sequence[TokenSequence], top: int) -> list[TokenScores]:
        found: dict[int, TokenScores] = {}
        for rows in self._passes([len(sequence.tokens_t) for sequence in sequences]):
            part = [sequences[row] for row in rows]
            found |= dict(zip(rows, self._score_pass(part, top), strict=True))
        return [found[row] for row in range(len(sequences))]

    def _score_pass(self, sequences: Sequence[TokenSequence], top: int) -> list[TokenScores]:
        """One pass through the model. The logits before the first scored token are not computed."""
        import torch

        ids_bt, valid_bt = _padded([sequence.tokens_t for sequence in sequences], 0, self._model.device)
        first = min([int(sequence.scored_n[0]) for sequence in sequences if len(sequence.scored_n)], default=1) - 1
        kept = ids_bt.shape[1] - first
        with torch.inference_mode():
            output = self._model(input_ids=ids_bt, attention_mask=valid_bt, use_cache=False, logits_to_keep=kept)
            found = []
            for row, sequence in enumerate(sequences):
                scored_n = torch.from_numpy(sequence.scored_n).to(ids_bt.device)
                logits_nv = output.logits[row, scored_n - 1 - first, : self._spec.policy_tokens]
                found.append(_scores(logits_nv, ids_bt[row, scored_n], self._spec.temperature, top))
            return found

    def _rewards(self, sequences: Sequence[NDArray[np.int32]]) -> list[float]:
        import torch

        found: dict[int, float] = {}
        with torch.inference_mode():
            for rows in self._passes([len(tokens_t) for tokens_t in sequences]):
                part = [sequences[row] for row in rows]
                padding = self._set_padding(part)
                ids_bt, valid_bt = _padded(part, padding, self._model.device)
                rewards_b1 = self._model(input_ids=ids_bt, attention_mask=valid_bt).logits
                found |= dict(zip(rows, rewards_b1[:, 0].double().tolist(), strict=True))
        return [found[row] for row in range(len(sequences))]

    def _set_padding(self, sequences: Sequence[NDArray[np.int32]]) -> int:
        """Gives the model a padding token that is in none of the sequences: decoders with a head look for the last
        token that is no padding."""
        config, used = self._model.config.get_text_config(), set(np.concatenate(sequences).tolist())
        if config.pad_token_id is None or config.pad_token_id in used:
            config.pad_token_id = next(token for token in range(self.vocabulary) if token not in used)
        return int(config.pad_token_id)

    def _passes(self, lengths: Sequence[int]) -> list[list[int]]:
        """The sequences, by number, in passes of similar lengths that have at most `batch_tokens` when padded."""
        passes: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if passes and lengths[passes[-1][0]] * (len(passes[-1]) + 1) <= self._spec.pool.batch_tokens:
                passes[-1].append(row)
            else:
                passes.append([row])
        return passes


def _padded(sequences: Sequence[NDArray[np.int32]], padding: int, device: Any) -> "tuple[Tensor, Tensor]":
    """The sequences padded on the right, int64 [B, T], and 1 if a place holds a token of its sequence."""
    import torch

    ids_bt = np.full((len(sequences), max(map(len, sequences))), padding, np.int64)
    valid_bt = np.zeros_like(ids_bt)
    for row, tokens_t in enumerate(sequences):
        ids_bt[row, : len(tokens_t)] = tokens_t
        valid_bt[row, : len(tokens_t)] = 1
    return torch.from_numpy(ids_bt).to(device), torch.from_numpy(valid_bt).to(device)


def _scores(logits_nv: "Tensor", targets_n: "Tensor", temperature: float, top: int) -> TokenScores:
    """Log-probabilities of the targets and of the most likely tokens, a chunk of places at a time."""
    import torch

    logprobs, tokens, values = [], [], []
    chunk = max(1, CHUNK_BYTES // (4 * logits_nv.shape[1]))
    for part_nv, targets in zip(logits_nv.split(chunk), targets_n.split(chunk), strict=True):
        logprobs_nv = (part_nv.float() / temperature).log_softmax(-1)
        logprobs.append(logprobs_nv.gather(1, targets[:, None])[:, 0])
        top_nk = logprobs_nv.topk(top, dim=-1)
        tokens.append(top_nk.indices.int())
        values.append(top_nk.values)
    return TokenScores(*(torch.cat(parts).cpu().numpy() for parts in (logprobs, tokens, values)))
