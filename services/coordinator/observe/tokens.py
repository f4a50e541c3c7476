"""The tokens of groups that people look at: a record of each group, and its tokens with texts and log-probabilities."""

import itertools
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import structlog

from millrace.hub import HubName
from millrace.rest import TokensView
from millrace.trajectories import sampled_spans
from millrace.wire.arrays import unpack_logprobs, unpack_tokens
from millrace.wire.v1 import common_pb2

log = structlog.get_logger(__name__)
TOKENIZER = "tokenizer.json"
TOKENIZERS_HELD = 4


def record(group: common_pb2.Group) -> bytes:
    """What is kept of a group: prompt tokens, and of each trajectory tokens, log-probabilities, versions and turns."""
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
    return zlib.compress(kept.SerializeToString(), 1)


def views(record: bytes, model: str) -> list[TokensView]:
    """The tokens of each trajectory in a record. `model`: folder or name on the hub of the job's model."""
    group = common_pb2.Group.FromString(zlib.decompress(record))
    return [_view(group, trajectory, tokenizer_file(model)) for trajectory in group.trajectories]


def _view(group: common_pb2.Group, trajectory: common_pb2.Trajectory, tokenizer: Path | None) -> TokensView:
    prompt = unpack_tokens(trajectory.prompt_tokens or group.prompt_tokens).tolist()
    response = unpack_tokens(trajectory.tokens).tolist()
    logprobs: list[float | None] = [None] * (len(prompt) + len(response))
    versions: list[int | None] = [None] * len(logprobs)
    told = iter(unpack_logprobs(trajectory.logprobs).tolist())
    for start, end in sampled_spans(trajectory):
        logprobs[len(prompt) + start : len(prompt) + end] = itertools.islice(told, end - start)
    for span in trajectory.versions:
        versions[len(prompt) + span.start : len(prompt) + span.end] = [span.version] * (span.end - span.start)
    ids = [*prompt, *response]
    return TokensView(
        prompt_tokens=len(prompt),
        ids=ids,
        texts=None if tokenizer is None else _texts(ids, str(tokenizer)),
        logprobs=logprobs,
        versions=versions,
    )


def tokenizer_file(model: str) -> Path | None:
    """The tokenizer of a model on this host. Nothing is downloaded; None where it is not there."""
    name = HubName.of_model(model, "model.path")
    if name is None:
        path = Path(model) / TOKENIZER
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name.repository, TOKENIZER, revision=name.revision)
    return Path(found) if isinstance(found, str) else None


def _texts(ids: Sequence[int], tokenizer: str) -> list[str] | None:
    """The text of each token; None where the tokenizer cannot be read. A character of several tokens is whole at the
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
