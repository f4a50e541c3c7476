from millrace.contracts.v1 import common_pb2 as _common_pb2
from millrace.contracts.v1 import trainer_pb2 as _trainer_pb2
from millrace.contracts.v1 import weights_pb2 as _weights_pb2
from millrace.contracts.v1 import work_pb2 as _work_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_IDLE: _ClassVar[EngineState]
    ENGINE_STATE_STARTING: _ClassVar[EngineState]
    ENGINE_STATE_WITHOUT_WEIGHTS: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_FAILED: _ClassVar[EngineState]

class Boundary(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOUNDARY_UNSPECIFIED: _ClassVar[Boundary]
    BOUNDARY_PROCESSES: _ClassVar[Boundary]
    BOUNDARY_FILES: _ClassVar[Boundary]
    BOUNDARY_NETWORK: _ClassVar[Boundary]
    BOUNDARY_IPC: _ClassVar[Boundary]
    BOUNDARY_USER: _ClassVar[Boundary]
    BOUNDARY_LIMITS: _ClassVar[Boundary]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_IDLE: EngineState
ENGINE_STATE_STARTING: EngineState
ENGINE_STATE_WITHOUT_WEIGHTS: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_FAILED: EngineState
BOUNDARY_UNSPECIFIED: Boundary
BOUNDARY_PROCESSES: Boundary
BOUNDARY_FILES: Boundary
BOUNDARY_NETWORK: Boundary
BOUNDARY_IPC: Boundary
BOUNDARY_USER: Boundary
BOUNDARY_LIMITS: Boundary

class MissingBoundary(_message.Message):
    __slots__ = ("boundary", "reason")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    boundary: Boundary
    reason: str
    def __init__(self, boundary: _Optional[_Union[Boundary, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ConfigureRolloutRequest(_message.Message):
    __slots__ = ("job_id", "spec", "epoch")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    spec: str
    epoch: int
    def __init__(self, job_id: _Optional[str] = ..., spec: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ConfigureRolloutResponse(_message.Message):
    __slots__ = ("world_size", "dtype", "seconds", "has_base", "missing_boundaries", "kept_engine", "engine_changes")
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    HAS_BASE_FIELD_NUMBER: _ClassVar[int]
    MISSING_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    KEPT_ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    world_size: int
    dtype: str
    seconds: float
    has_base: bool
    missing_boundaries: _containers.RepeatedCompositeFieldContainer[MissingBoundary]
    kept_engine: bool
    engine_changes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, world_size: _Optional[int] = ..., dtype: _Optional[str] = ..., seconds: _Optional[float] = ..., has_base: bool = ..., missing_boundaries: _Optional[_Iterable[_Union[MissingBoundary, _Mapping]]] = ..., kept_engine: bool = ..., engine_changes: _Optional[_Iterable[str]] = ...) -> None: ...

class DescribeReceiveRequest(_message.Message):
    __slots__ = ("job_id", "manifest")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    manifest: _weights_pb2.Manifest
    def __init__(self, job_id: _Optional[str] = ..., manifest: _Optional[_Union[_weights_pb2.Manifest, _Mapping]] = ...) -> None: ...

class DescribeReceiveResponse(_message.Message):
    __slots__ = ("layouts", "gpu", "deltas")
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    layouts: _weights_pb2.Layouts
    gpu: bool
    deltas: bool
    def __init__(self, layouts: _Optional[_Union[_weights_pb2.Layouts, _Mapping]] = ..., gpu: bool = ..., deltas: bool = ...) -> None: ...

class PrepareReceiveRequest(_message.Message):
    __slots__ = ("publication", "path", "manifest", "rendezvous", "receiver", "plan_hash", "deadline_s", "sides", "mode", "begin", "base")
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SIDES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    publication: _weights_pb2.PublicationRef
    path: _weights_pb2.Path
    manifest: _weights_pb2.Manifest
    rendezvous: _weights_pb2.Rendezvous
    receiver: _weights_pb2.Receiver
    plan_hash: bytes
    deadline_s: float
    sides: _weights_pb2.Sides
    mode: _weights_pb2.CommitMode
    begin: bool
    base: _weights_pb2.PublicationRef
    def __init__(self, publication: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ..., path: _Optional[_Union[_weights_pb2.Path, str]] = ..., manifest: _Optional[_Union[_weights_pb2.Manifest, _Mapping]] = ..., rendezvous: _Optional[_Union[_weights_pb2.Rendezvous, _Mapping]] = ..., receiver: _Optional[_Union[_weights_pb2.Receiver, _Mapping]] = ..., plan_hash: _Optional[bytes] = ..., deadline_s: _Optional[float] = ..., sides: _Optional[_Union[_weights_pb2.Sides, _Mapping]] = ..., mode: _Optional[_Union[_weights_pb2.CommitMode, str]] = ..., begin: bool = ..., base: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ...) -> None: ...

class PrepareReceiveResponse(_message.Message):
    __slots__ = ("plan_hash", "begun", "lacks_base")
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    LACKS_BASE_FIELD_NUMBER: _ClassVar[int]
    plan_hash: bytes
    begun: bool
    lacks_base: bool
    def __init__(self, plan_hash: _Optional[bytes] = ..., begun: bool = ..., lacks_base: bool = ...) -> None: ...

class TransferReceiveRequest(_message.Message):
    __slots__ = ("publication",)
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    publication: _weights_pb2.PublicationRef
    def __init__(self, publication: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ...) -> None: ...

class TransferReceiveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyReceiveRequest(_message.Message):
    __slots__ = ("publication", "checksums", "commit")
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    publication: _weights_pb2.PublicationRef
    checksums: _weights_pb2.Checksums
    commit: bool
    def __init__(self, publication: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ..., checksums: _Optional[_Union[_weights_pb2.Checksums, _Mapping]] = ..., commit: bool = ...) -> None: ...

class VerifyReceiveResponse(_message.Message):
    __slots__ = ("report", "commit_failure", "commit_refused")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_REFUSED_FIELD_NUMBER: _ClassVar[int]
    report: _weights_pb2.MemberReport
    commit_failure: str
    commit_refused: bool
    def __init__(self, report: _Optional[_Union[_weights_pb2.MemberReport, _Mapping]] = ..., commit_failure: _Optional[str] = ..., commit_refused: bool = ...) -> None: ...

class CommitReceiveRequest(_message.Message):
    __slots__ = ("publication",)
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    publication: _weights_pb2.PublicationRef
    def __init__(self, publication: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ...) -> None: ...

class CommitReceiveResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _weights_pb2.MemberReport
    def __init__(self, report: _Optional[_Union[_weights_pb2.MemberReport, _Mapping]] = ...) -> None: ...

class AbortReceiveRequest(_message.Message):
    __slots__ = ("publication", "reason")
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    publication: _weights_pb2.PublicationRef
    reason: str
    def __init__(self, publication: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortReceiveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "sampling")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    sampling: _work_pb2.Sampling
    def __init__(self, prompt: _Optional[str] = ..., sampling: _Optional[_Union[_work_pb2.Sampling, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("prompt_tokens", "trajectories")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: bytes
    trajectories: _containers.RepeatedCompositeFieldContainer[_common_pb2.Trajectory]
    def __init__(self, prompt_tokens: _Optional[bytes] = ..., trajectories: _Optional[_Iterable[_Union[_common_pb2.Trajectory, _Mapping]]] = ...) -> None: ...

class RolloutStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("member_id", "state", "job_id", "version", "running", "waiting", "free", "generated_tokens", "engine", "engine_release", "failure", "missing_boundaries")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RELEASE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MISSING_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    state: EngineState
    job_id: str
    version: int
    running: int
    waiting: int
    free: int
    generated_tokens: int
    engine: str
    engine_release: str
    failure: str
    missing_boundaries: _containers.RepeatedCompositeFieldContainer[MissingBoundary]
    def __init__(self, member_id: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., job_id: _Optional[str] = ..., version: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., engine: _Optional[str] = ..., engine_release: _Optional[str] = ..., failure: _Optional[str] = ..., missing_boundaries: _Optional[_Iterable[_Union[MissingBoundary, _Mapping]]] = ...) -> None: ...

class DrainRolloutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRolloutResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
