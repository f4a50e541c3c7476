from millrace.contracts.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseRef(_message.Message):
    __slots__ = ("job_id", "lease_id", "fence", "purpose")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    lease_id: str
    fence: int
    purpose: _common_pb2.Purpose
    def __init__(self, job_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., fence: _Optional[int] = ..., purpose: _Optional[_Union[_common_pb2.Purpose, str]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("samples", "max_response_tokens", "temperature", "top_p", "top_k", "stop", "greedy_baseline", "min_samples")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GREEDY_BASELINE_FIELD_NUMBER: _ClassVar[int]
    MIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    max_response_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    greedy_baseline: bool
    min_samples: int
    def __init__(self, samples: _Optional[int] = ..., max_response_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., greedy_baseline: bool = ..., min_samples: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("ref", "prompt_id", "purpose", "sampling", "data_source", "prompt", "ground_truth", "extra_info", "expires_s", "traceparent", "issued_s", "parts", "images")
    REF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
    EXTRA_INFO_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ISSUED_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ref: LeaseRef
    prompt_id: str
    purpose: _common_pb2.Purpose
    sampling: Sampling
    data_source: str
    prompt: str
    ground_truth: str
    extra_info: str
    expires_s: float
    traceparent: str
    issued_s: float
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    images: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ref: _Optional[_Union[LeaseRef, _Mapping]] = ..., prompt_id: _Optional[str] = ..., purpose: _Optional[_Union[_common_pb2.Purpose, str]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., data_source: _Optional[str] = ..., prompt: _Optional[str] = ..., ground_truth: _Optional[str] = ..., extra_info: _Optional[str] = ..., expires_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., issued_s: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., images: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("request", "start", "tokens", "logprobs", "versions", "experts")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    request: int
    start: int
    tokens: bytes
    logprobs: bytes
    versions: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    experts: _common_pb2.Experts
    def __init__(self, request: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ..., experts: _Optional[_Union[_common_pb2.Experts, _Mapping]] = ...) -> None: ...

class LeaseParts(_message.Message):
    __slots__ = ("ref", "parts")
    REF_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ref: LeaseRef
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, ref: _Optional[_Union[LeaseRef, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("member_id", "free_samples", "wait_s")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    FREE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    free_samples: int
    wait_s: float
    def __init__(self, member_id: _Optional[str] = ..., free_samples: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("leases", "idle_reason")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    IDLE_REASON_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    idle_reason: str
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., idle_reason: _Optional[str] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("member_id", "leases", "parts")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    parts: _containers.RepeatedCompositeFieldContainer[LeaseParts]
    def __init__(self, member_id: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[LeaseParts, _Mapping]]] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ("expires_s", "lost")
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    expires_s: float
    lost: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    def __init__(self, expires_s: _Optional[float] = ..., lost: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("member_id", "ref", "group", "drop")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    ref: LeaseRef
    group: _common_pb2.Group
    drop: _common_pb2.Drop
    def __init__(self, member_id: _Optional[str] = ..., ref: _Optional[_Union[LeaseRef, _Mapping]] = ..., group: _Optional[_Union[_common_pb2.Group, _Mapping]] = ..., drop: _Optional[_Union[_common_pb2.Drop, _Mapping]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("member_id", "leases", "parts")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    parts: _containers.RepeatedCompositeFieldContainer[LeaseParts]
    def __init__(self, member_id: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[LeaseParts, _Mapping]]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("job_id", "prompt_ids")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[str]] = ...) -> None: ...
