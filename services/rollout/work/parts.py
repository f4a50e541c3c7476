"""Parts of the responses of a lease: what a replica reports with each extension, and what it continues from."""

from collections.abc import Iterable, Mapping

from millrace.contracts.trajectories import assembled, tokens_of
from millrace.contracts.v1 import common_pb2, work_pb2
from millrace.ids import Version
from millrace.wire.arrays import (
    pack_experts,
    pack_logprobs,
    pack_tokens,
    reported_experts,
    unpack_logprobs,
    unpack_tokens,
)
from services.rollout.engine import Partial, Response, VersionSpan


def prefixes(parts: Iterable[work_pb2.Part]) -> dict[int, Partial]:
    """What was sampled before of the response to each request of a lease."""
    return {
        part.request: Partial(
            unpack_tokens(part.tokens),
            unpack_logprobs(part.logprobs),
            tuple(VersionSpan(Version(v.version), v.start, v.end) for v in part.versions),
            reported_experts(part.experts) if part.HasField("experts") else None,
        )
        for part in assembled(parts)
    }


def unreported(responses: Mapping[int, Response]) -> list[work_pb2.Part]:
    """What the responses have got that is not kept by the coordinator."""
    parts = []
    for request, response in responses.items():
        new = response.after(response.kept)
        experts = None if new.experts is None or response.kept_experts else pack_experts(new.experts)
        if len(new) or experts is not None:
            versions = [common_pb2.VersionSpan(version=v.version, start=v.start, end=v.end) for v in new.versions]
            part = work_pb2.Part(request=request, start=response.kept, versions=versions, experts=experts)
            part.tokens, part.logprobs = pack_tokens(new.tokens), pack_logprobs(new.logprobs)
            parts.append(part)
    return parts


def reported(responses: Mapping[int, Response], parts: Iterable[work_pb2.Part]) -> None:
    """The coordinator keeps `parts` now."""
    for part in parts:
        response = responses[part.request]
        response.kept = part.start + tokens_of(part)
        response.kept_experts = response.kept_experts or part.HasField("experts")
