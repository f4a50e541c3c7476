from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_KIND_UNSPECIFIED: _ClassVar[MemberKind]
    MEMBER_KIND_TRAINER: _ClassVar[MemberKind]
    MEMBER_KIND_ROLLOUT: _ClassVar[MemberKind]
MEMBER_KIND_UNSPECIFIED: MemberKind
MEMBER_KIND_TRAINER: MemberKind
MEMBER_KIND_ROLLOUT: MemberKind

class RegisterRequest(_message.Message):
    __slots__ = ("member_id", "kind", "address", "protocol_version", "release", "engine", "engine_release", "world_size", "host", "device", "metrics_port", "sessions_port", "pool", "previous", "partition")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RELEASE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_PORT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    kind: MemberKind
    address: str
    protocol_version: int
    release: str
    engine: str
    engine_release: str
    world_size: int
    host: str
    device: str
    metrics_port: int
    sessions_port: int
    pool: str
    previous: PreviousLife
    partition: str
    def __init__(self, member_id: _Optional[str] = ..., kind: _Optional[_Union[MemberKind, str]] = ..., address: _Optional[str] = ..., protocol_version: _Optional[int] = ..., release: _Optional[str] = ..., engine: _Optional[str] = ..., engine_release: _Optional[str] = ..., world_size: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., metrics_port: _Optional[int] = ..., sessions_port: _Optional[int] = ..., pool: _Optional[str] = ..., previous: _Optional[_Union[PreviousLife, _Mapping]] = ..., partition: _Optional[str] = ...) -> None: ...

class PreviousLife(_message.Message):
    __slots__ = ("member_id", "ended", "last_words")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LAST_WORDS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    ended: str
    last_words: str
    def __init__(self, member_id: _Optional[str] = ..., ended: _Optional[str] = ..., last_words: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("epoch", "heartbeat_s", "lost_after_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LOST_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    heartbeat_s: float
    lost_after_s: float
    def __init__(self, epoch: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., lost_after_s: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("member_id", "running", "waiting", "free", "version", "tokens", "spans", "span_count", "judge_outages", "usage")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    SPAN_COUNT_FIELD_NUMBER: _ClassVar[int]
    JUDGE_OUTAGES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    running: int
    waiting: int
    free: int
    version: int
    tokens: int
    spans: bytes
    span_count: int
    judge_outages: _containers.RepeatedCompositeFieldContainer[JudgeOutage]
    usage: MemberUsage
    def __init__(self, member_id: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free: _Optional[int] = ..., version: _Optional[int] = ..., tokens: _Optional[int] = ..., spans: _Optional[bytes] = ..., span_count: _Optional[int] = ..., judge_outages: _Optional[_Iterable[_Union[JudgeOutage, _Mapping]]] = ..., usage: _Optional[_Union[MemberUsage, _Mapping]] = ...) -> None: ...

class MemberUsage(_message.Message):
    __slots__ = ("hosts", "gpus", "cache_used")
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    CACHE_USED_FIELD_NUMBER: _ClassVar[int]
    hosts: _containers.RepeatedCompositeFieldContainer[HostUsage]
    gpus: _containers.RepeatedCompositeFieldContainer[GpuUsage]
    cache_used: float
    def __init__(self, hosts: _Optional[_Iterable[_Union[HostUsage, _Mapping]]] = ..., gpus: _Optional[_Iterable[_Union[GpuUsage, _Mapping]]] = ..., cache_used: _Optional[float] = ...) -> None: ...

class HostUsage(_message.Message):
    __slots__ = ("host", "process_bytes", "used_bytes", "size_bytes")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    host: str
    process_bytes: int
    used_bytes: int
    size_bytes: int
    def __init__(self, host: _Optional[str] = ..., process_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class GpuUsage(_message.Message):
    __slots__ = ("host", "gpu", "used_bytes", "size_bytes", "busy", "power_w", "temperature_c")
    HOST_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    host: str
    gpu: str
    used_bytes: int
    size_bytes: int
    busy: float
    power_w: float
    temperature_c: float
    def __init__(self, host: _Optional[str] = ..., gpu: _Optional[str] = ..., used_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., busy: _Optional[float] = ..., power_w: _Optional[float] = ..., temperature_c: _Optional[float] = ...) -> None: ...

class JudgeOutage(_message.Message):
    __slots__ = ("name", "reason", "waiting", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    waiting: int
    seconds: float
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., waiting: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("epoch", "drain", "heartbeat_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    drain: bool
    heartbeat_s: float
    def __init__(self, epoch: _Optional[int] = ..., drain: bool = ..., heartbeat_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("member_id",)
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    def __init__(self, member_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("save_follows",)
    SAVE_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    save_follows: bool
    def __init__(self, save_follows: bool = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("member_id", "reason", "failed")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    reason: str
    failed: bool
    def __init__(self, member_id: _Optional[str] = ..., reason: _Optional[str] = ..., failed: bool = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindPoolRequest(_message.Message):
    __slots__ = ("job_id", "pool", "wait_s")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    pool: str
    wait_s: float
    def __init__(self, job_id: _Optional[str] = ..., pool: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class FindPoolResponse(_message.Message):
    __slots__ = ("addresses", "endpoints")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., endpoints: _Optional[_Iterable[str]] = ...) -> None: ...
