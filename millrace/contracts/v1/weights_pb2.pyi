from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Content(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTENT_UNSPECIFIED: _ClassVar[Content]
    CONTENT_MODEL: _ClassVar[Content]
    CONTENT_BASE: _ClassVar[Content]
    CONTENT_ADAPTER: _ClassVar[Content]

class Path(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATH_UNSPECIFIED: _ClassVar[Path]
    PATH_GATHER_BROADCAST: _ClassVar[Path]
    PATH_SHARDED: _ClassVar[Path]
    PATH_DELTA: _ClassVar[Path]

class CommitMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_MODE_UNSPECIFIED: _ClassVar[CommitMode]
    COMMIT_MODE_SHADOW: _ClassVar[CommitMode]
    COMMIT_MODE_INPLACE: _ClassVar[CommitMode]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREPARE: _ClassVar[Phase]
    PHASE_TRANSFER: _ClassVar[Phase]
    PHASE_VERIFY: _ClassVar[Phase]
    PHASE_COMMIT: _ClassVar[Phase]
    PHASE_DONE: _ClassVar[Phase]
    PHASE_ABORTED: _ClassVar[Phase]
CONTENT_UNSPECIFIED: Content
CONTENT_MODEL: Content
CONTENT_BASE: Content
CONTENT_ADAPTER: Content
PATH_UNSPECIFIED: Path
PATH_GATHER_BROADCAST: Path
PATH_SHARDED: Path
PATH_DELTA: Path
COMMIT_MODE_UNSPECIFIED: CommitMode
COMMIT_MODE_SHADOW: CommitMode
COMMIT_MODE_INPLACE: CommitMode
PHASE_UNSPECIFIED: Phase
PHASE_PREPARE: Phase
PHASE_TRANSFER: Phase
PHASE_VERIFY: Phase
PHASE_COMMIT: Phase
PHASE_DONE: Phase
PHASE_ABORTED: Phase

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("tensors", "hash", "content")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    hash: bytes
    content: Content
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., hash: _Optional[bytes] = ..., content: _Optional[_Union[Content, str]] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("tensor", "offset", "extent")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    offset: _containers.RepeatedScalarFieldContainer[int]
    extent: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensor: _Optional[int] = ..., offset: _Optional[_Iterable[int]] = ..., extent: _Optional[_Iterable[int]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("rank", "boxes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    boxes: _containers.RepeatedCompositeFieldContainer[Box]
    def __init__(self, rank: _Optional[int] = ..., boxes: _Optional[_Iterable[_Union[Box, _Mapping]]] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("box", "source", "targets")
    BOX_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    box: Box
    source: int
    targets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, box: _Optional[_Union[Box, _Mapping]] = ..., source: _Optional[int] = ..., targets: _Optional[_Iterable[int]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("transfers", "hash")
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    hash: bytes
    def __init__(self, transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., hash: _Optional[bytes] = ...) -> None: ...

class Layouts(_message.Message):
    __slots__ = ("distinct", "of_rank", "host_of_rank")
    DISTINCT_FIELD_NUMBER: _ClassVar[int]
    OF_RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_OF_RANK_FIELD_NUMBER: _ClassVar[int]
    distinct: _containers.RepeatedScalarFieldContainer[bytes]
    of_rank: _containers.RepeatedScalarFieldContainer[int]
    host_of_rank: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, distinct: _Optional[_Iterable[bytes]] = ..., of_rank: _Optional[_Iterable[int]] = ..., host_of_rank: _Optional[_Iterable[str]] = ...) -> None: ...

class Sides(_message.Message):
    __slots__ = ("senders", "receivers", "message_bytes")
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    senders: Layouts
    receivers: Layouts
    message_bytes: int
    def __init__(self, senders: _Optional[_Union[Layouts, _Mapping]] = ..., receivers: _Optional[_Union[Layouts, _Mapping]] = ..., message_bytes: _Optional[int] = ...) -> None: ...

class PublicationRef(_message.Message):
    __slots__ = ("job_id", "version", "epoch", "attempt")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    version: int
    epoch: int
    attempt: int
    def __init__(self, job_id: _Optional[str] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("host", "port", "world_size", "key", "nccl_id", "standing", "passing")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NCCL_ID_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    PASSING_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    world_size: int
    key: str
    nccl_id: bytes
    standing: bool
    passing: bool
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., world_size: _Optional[int] = ..., key: _Optional[str] = ..., nccl_id: _Optional[bytes] = ..., standing: bool = ..., passing: bool = ...) -> None: ...

class Receiver(_message.Message):
    __slots__ = ("member_id", "first_rank", "world_size")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    first_rank: int
    world_size: int
    def __init__(self, member_id: _Optional[str] = ..., first_rank: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class Checksums(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class MemberReport(_message.Message):
    __slots__ = ("member_id", "bytes", "prepare_s", "gather_s", "wire_s", "verify_s", "apply_s", "pause_s", "loader_tensors", "loader_bytes", "mode", "staging_bytes", "loader_names", "sent_bytes", "changed", "code_s", "snapshot_bytes", "idle_ratio")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    GATHER_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    LOADER_TENSORS_FIELD_NUMBER: _ClassVar[int]
    LOADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADER_NAMES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    CODE_S_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_RATIO_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    bytes: int
    prepare_s: float
    gather_s: float
    wire_s: float
    verify_s: float
    apply_s: float
    pause_s: float
    loader_tensors: int
    loader_bytes: int
    mode: CommitMode
    staging_bytes: int
    loader_names: _containers.RepeatedScalarFieldContainer[str]
    sent_bytes: int
    changed: float
    code_s: float
    snapshot_bytes: int
    idle_ratio: float
    def __init__(self, member_id: _Optional[str] = ..., bytes: _Optional[int] = ..., prepare_s: _Optional[float] = ..., gather_s: _Optional[float] = ..., wire_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., apply_s: _Optional[float] = ..., pause_s: _Optional[float] = ..., loader_tensors: _Optional[int] = ..., loader_bytes: _Optional[int] = ..., mode: _Optional[_Union[CommitMode, str]] = ..., staging_bytes: _Optional[int] = ..., loader_names: _Optional[_Iterable[str]] = ..., sent_bytes: _Optional[int] = ..., changed: _Optional[float] = ..., code_s: _Optional[float] = ..., snapshot_bytes: _Optional[int] = ..., idle_ratio: _Optional[float] = ...) -> None: ...
