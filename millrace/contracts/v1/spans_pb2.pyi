from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_KIND_UNSPECIFIED: _ClassVar[SpanKind]
    SPAN_KIND_START: _ClassVar[SpanKind]
    SPAN_KIND_SUBMIT: _ClassVar[SpanKind]
    SPAN_KIND_JOB_QUEUE: _ClassVar[SpanKind]
    SPAN_KIND_CONFIGURE: _ClassVar[SpanKind]
    SPAN_KIND_STEP: _ClassVar[SpanKind]
    SPAN_KIND_ISSUE: _ClassVar[SpanKind]
    SPAN_KIND_ADMIT: _ClassVar[SpanKind]
    SPAN_KIND_TRAIN: _ClassVar[SpanKind]
    SPAN_KIND_FETCH: _ClassVar[SpanKind]
    SPAN_KIND_ASSESS: _ClassVar[SpanKind]
    SPAN_KIND_UPDATE: _ClassVar[SpanKind]
    SPAN_KIND_REPORT: _ClassVar[SpanKind]
    SPAN_KIND_MARK: _ClassVar[SpanKind]
    SPAN_KIND_EVALUATE: _ClassVar[SpanKind]
    SPAN_KIND_CHECKPOINT: _ClassVar[SpanKind]
    SPAN_KIND_TRACK: _ClassVar[SpanKind]
    SPAN_KIND_PUBLISH: _ClassVar[SpanKind]
    SPAN_KIND_PREPARE: _ClassVar[SpanKind]
    SPAN_KIND_TRANSFER: _ClassVar[SpanKind]
    SPAN_KIND_VERIFY: _ClassVar[SpanKind]
    SPAN_KIND_COMMIT: _ClassVar[SpanKind]
    SPAN_KIND_PAUSE: _ClassVar[SpanKind]
    SPAN_KIND_GROUP: _ClassVar[SpanKind]
    SPAN_KIND_QUEUE: _ClassVar[SpanKind]
    SPAN_KIND_LEASE: _ClassVar[SpanKind]
    SPAN_KIND_RENDER: _ClassVar[SpanKind]
    SPAN_KIND_ENGINE_QUEUE: _ClassVar[SpanKind]
    SPAN_KIND_GENERATE: _ClassVar[SpanKind]
    SPAN_KIND_ENVIRONMENT: _ClassVar[SpanKind]
    SPAN_KIND_TOOL: _ClassVar[SpanKind]
    SPAN_KIND_SCORE: _ClassVar[SpanKind]
    SPAN_KIND_COMPLETE: _ClassVar[SpanKind]
    SPAN_KIND_HOLD: _ClassVar[SpanKind]

class SpanSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_SOURCE_UNSPECIFIED: _ClassVar[SpanSource]
    SPAN_SOURCE_COORDINATOR: _ClassVar[SpanSource]
    SPAN_SOURCE_TRAINER: _ClassVar[SpanSource]
    SPAN_SOURCE_ROLLOUT: _ClassVar[SpanSource]
SPAN_KIND_UNSPECIFIED: SpanKind
SPAN_KIND_START: SpanKind
SPAN_KIND_SUBMIT: SpanKind
SPAN_KIND_JOB_QUEUE: SpanKind
SPAN_KIND_CONFIGURE: SpanKind
SPAN_KIND_STEP: SpanKind
SPAN_KIND_ISSUE: SpanKind
SPAN_KIND_ADMIT: SpanKind
SPAN_KIND_TRAIN: SpanKind
SPAN_KIND_FETCH: SpanKind
SPAN_KIND_ASSESS: SpanKind
SPAN_KIND_UPDATE: SpanKind
SPAN_KIND_REPORT: SpanKind
SPAN_KIND_MARK: SpanKind
SPAN_KIND_EVALUATE: SpanKind
SPAN_KIND_CHECKPOINT: SpanKind
SPAN_KIND_TRACK: SpanKind
SPAN_KIND_PUBLISH: SpanKind
SPAN_KIND_PREPARE: SpanKind
SPAN_KIND_TRANSFER: SpanKind
SPAN_KIND_VERIFY: SpanKind
SPAN_KIND_COMMIT: SpanKind
SPAN_KIND_PAUSE: SpanKind
SPAN_KIND_GROUP: SpanKind
SPAN_KIND_QUEUE: SpanKind
SPAN_KIND_LEASE: SpanKind
SPAN_KIND_RENDER: SpanKind
SPAN_KIND_ENGINE_QUEUE: SpanKind
SPAN_KIND_GENERATE: SpanKind
SPAN_KIND_ENVIRONMENT: SpanKind
SPAN_KIND_TOOL: SpanKind
SPAN_KIND_SCORE: SpanKind
SPAN_KIND_COMPLETE: SpanKind
SPAN_KIND_HOLD: SpanKind
SPAN_SOURCE_UNSPECIFIED: SpanSource
SPAN_SOURCE_COORDINATOR: SpanSource
SPAN_SOURCE_TRAINER: SpanSource
SPAN_SOURCE_ROLLOUT: SpanSource

class Span(_message.Message):
    __slots__ = ("kind", "trace_id", "span_id", "parent_id", "start_s", "seconds", "job_id", "step", "group", "detail", "figures")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    kind: SpanKind
    trace_id: bytes
    span_id: int
    parent_id: int
    start_s: float
    seconds: float
    job_id: str
    step: int
    group: str
    detail: str
    figures: _containers.ScalarMap[str, float]
    def __init__(self, kind: _Optional[_Union[SpanKind, str]] = ..., trace_id: _Optional[bytes] = ..., span_id: _Optional[int] = ..., parent_id: _Optional[int] = ..., start_s: _Optional[float] = ..., seconds: _Optional[float] = ..., job_id: _Optional[str] = ..., step: _Optional[int] = ..., group: _Optional[str] = ..., detail: _Optional[str] = ..., figures: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SpanBatch(_message.Message):
    __slots__ = ("member_id", "source", "spans", "dropped")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    source: SpanSource
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    dropped: int
    def __init__(self, member_id: _Optional[str] = ..., source: _Optional[_Union[SpanSource, str]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...
