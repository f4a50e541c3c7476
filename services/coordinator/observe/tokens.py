"""The tokens of groups that people look at: a record of each group, and its tokens with texts and log-probabilities."""

import itertools
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import structlog
from google.protobuf.message import Message

from millrace.contracts.trajectories import Span, sampled_spans
from millrace.contracts.v1 import common_pb2, trainer_pb2
from millrace.hub import HubName
from millrace.rest import TokensView
from millrace.wire.arrays import unpack_floats, unpack_tokens
from services.coordinator.store.records import TokenRecord

log = structlog.get_logger(__name__)
TOKENIZER = "tokenizer.json"
TOKENIZERS_HELD = 4


def fits(trained: trainer_pb2.TrainedGroup, group: common_pb2.Group) -> bool:
    """Whether the trainer reported what it has to of each sampled token of the group, in finite numbers."""
    if len(trained.trajectories) != len(group.trajectories):
        return False
    for answered, trajectory in zip(trained.trajectories, group.trajectories, strict=True):
        size = len(trajectory.logprobs)
        if len(answered.advantages) != size or len(answered.logprobs) not in (0, size):
            return False
        if not all(np.isfinite(unpack_floats(values)).all() for values in (answered.logprobs, answered.advantages)):
            return False
    return True


def record(group: common_pb2.Group, trained: trainer_pb2.TrainedGroup | None = None) -> TokenRecord:
    """What is kept of a group: prompt tokens, and of each trajectory tokens, log-probabilities, versions and turns; and
    what the trainer reported of it, which has to fit it."""
    kept = common_pb2.Group(prompt_tokens=group.prompt_tokens)
    for trajectory in group.trajectories:
        one = kept.trajectories.add(
            tokens=trajectory.tokens,
            logprobs=trajectory.logprobs,
            versions=trajectory.versions,
            prompt_tokens=trajectory.prompt_tokens,
        )
        for turn in trajectory.turns:
            one.turns.add(start=turn.start, end=turn.end)
    return TokenRecord(_packed(kept), b"" if trained is None else _packed(trained))


def _packed(message: Message) -> bytes:
    return zlib.compress(message.SerializeToString(), 1)


def views(record: TokenRecord, model: str) -> list[TokensView]:
    """The tokens of each trajectory in a record. `model`: folder or name on the hub of the job's model."""
    group = common_pb2.Group.FromString(zlib.decompress(record.group))
    answered = [trainer_pb2.TrainedTrajectory()] * len(group.trajectories)
    if record.trained:
        answered = list(trainer_pb2.TrainedGroup.FromString(zlib.decompress(record.trained)).trajectories)
    tokenizer = tokenizer_file(model)
    return [_view(group, each, trained, tokenizer) for each, trained in zip(group.trajectories, answered, strict=True)]


def _view(
    group: common_pb2.Group,
    trajectory: common_pb2.Trajectory,
    trained: trainer_pb2.TrainedTrajectory,
    tokenizer: Path | None,
) -> TokensView:
    prompt = unpack_tokens(trajectory.prompt_tokens or group.prompt_tokens).tolist()
    response = unpack_tokens(trajectory.tokens).tolist()
    versions: list[int | None] = [None] * (len(prompt) + len(response))
    for span in trajectory.versions:
        versions[len(prompt) + span.start : len(prompt) + span.end] = [span.version] * (span.end - span.start)
    sampled = [(len(prompt) + start, len(prompt) + end) for start, end in sampled_spans(trajectory)]
    ids = [*prompt, *response]
    return TokensView(
        prompt_tokens=len(prompt),
        ids=ids,
        texts=None if tokenizer is None else _texts(ids, str(tokenizer)),
        logprobs=_at(sampled, trajectory.logprobs, len(ids)),
        versions=versions,
        trainer_logprobs=_at(sampled, trained.logprobs, len(ids)) if trained.logprobs else [],
        advantages=_at(sampled, trained.advantages, len(ids)) if trained.advantages else [],
    )


def _at(spans: Sequence[Span], data: bytes, tokens: int) -> list[float | None]:
    """The values of sampled tokens in their places among all `tokens`, and None in all others."""
    values = iter(unpack_floats(data).tolist())
    placed: list[float | None] = [None] * tokens
    for start, end in spans:
        placed[start:end] = itertools.islice(values, end - start)
    return placed


def tokenizer_file(model: str) -> Path | None:
    """The tokenizer of a model on this host. Nothing is downloaded; None if it is not there."""
    name = HubName.of_model(model, "model.path")
    if name is None:
        path = Path(model) / TOKENIZER
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name.repository, TOKENIZER, revision=name.revision)
    return Path(found) if isinstance(found, str) else None


def _texts(ids: Sequence[int], tokenizer: str) -> list[str] | None:
    """The text of each token; None if the tokenizer cannot be read. A character of several tokens is whole at the
    last of them."""
    from tokenizers.decoders import DecodeStream

    try:
        read = _tokenizer(tokenizer)
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(read, token) or "" for token in ids]
    except Exception as error:  # the library raises nothing more precise
        log.info("the tokens have no texts", tokenizer=tokenizer, error=str(error))
        return None


@lru_cache(TOKENIZERS_HELD)
def _tokenizer(path: str):  # type: ignore[no-untyped-def]  # the library has no types
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)
