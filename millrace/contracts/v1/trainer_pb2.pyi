from millrace.contracts.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAINER_STATE_UNSPECIFIED: _ClassVar[TrainerState]
    TRAINER_STATE_IDLE: _ClassVar[TrainerState]
    TRAINER_STATE_CONFIGURING: _ClassVar[TrainerState]
    TRAINER_STATE_READY: _ClassVar[TrainerState]
    TRAINER_STATE_STEPPING: _ClassVar[TrainerState]
    TRAINER_STATE_PUBLISHING: _ClassVar[TrainerState]
    TRAINER_STATE_SAVING: _ClassVar[TrainerState]
    TRAINER_STATE_FAILED: _ClassVar[TrainerState]
TRAINER_STATE_UNSPECIFIED: TrainerState
TRAINER_STATE_IDLE: TrainerState
TRAINER_STATE_CONFIGURING: TrainerState
TRAINER_STATE_READY: TrainerState
TRAINER_STATE_STEPPING: TrainerState
TRAINER_STATE_PUBLISHING: TrainerState
TRAINER_STATE_SAVING: TrainerState
TRAINER_STATE_FAILED: TrainerState

class ConfigureTrainerRequest(_message.Message):
    __slots__ = ("job_id", "spec", "checkpoint", "configuration")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    spec: str
    checkpoint: str
    configuration: str
    def __init__(self, job_id: _Optional[str] = ..., spec: _Optional[str] = ..., checkpoint: _Optional[str] = ..., configuration: _Optional[str] = ...) -> None: ...

class ConfigureTrainerResponse(_message.Message):
    __slots__ = ("version", "world_size", "parameters", "warnings", "microbatches_at_once")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    world_size: int
    parameters: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    microbatches_at_once: int
    def __init__(self, version: _Optional[int] = ..., world_size: _Optional[int] = ..., parameters: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., microbatches_at_once: _Optional[int] = ...) -> None: ...

class GroupRef(_message.Message):
    __slots__ = ("prompt_id", "prompt_tokens", "response_tokens", "trajectories", "shown")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    prompt_tokens: int
    response_tokens: _containers.RepeatedScalarFieldContainer[int]
    trajectories: _containers.RepeatedCompositeFieldContainer[TrajectoryLengths]
    shown: bool
    def __init__(self, prompt_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., response_tokens: _Optional[_Iterable[int]] = ..., trajectories: _Optional[_Iterable[_Union[TrajectoryLengths, _Mapping]]] = ..., shown: bool = ...) -> None: ...

class TrajectoryLengths(_message.Message):
    __slots__ = ("prompt_tokens", "response_tokens", "sampled_tokens", "episode")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int
    episode: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., response_tokens: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., episode: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("job_id", "step", "groups", "work_address", "token_budget", "traceparent", "part", "step_groups")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WORK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    STEP_GROUPS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    step: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupRef]
    work_address: str
    token_budget: int
    traceparent: str
    part: int
    step_groups: int
    def __init__(self, job_id: _Optional[str] = ..., step: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupRef, _Mapping]]] = ..., work_address: _Optional[str] = ..., token_budget: _Optional[int] = ..., traceparent: _Optional[str] = ..., part: _Optional[int] = ..., step_groups: _Optional[int] = ...) -> None: ...

class AddPartRequest(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: StepRequest
    def __init__(self, part: _Optional[_Union[StepRequest, _Mapping]] = ...) -> None: ...

class AddPartResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("version", "metrics", "histograms", "shown")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class HistogramsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Histogram
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    version: int
    metrics: _containers.ScalarMap[str, float]
    histograms: _containers.MessageMap[str, Histogram]
    shown: _containers.RepeatedCompositeFieldContainer[TrainedGroup]
    def __init__(self, version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., histograms: _Optional[_Mapping[str, Histogram]] = ..., shown: _Optional[_Iterable[_Union[TrainedGroup, _Mapping]]] = ...) -> None: ...

class TrainedGroup(_message.Message):
    __slots__ = ("prompt_id", "trajectories")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    trajectories: _containers.RepeatedCompositeFieldContainer[TrainedTrajectory]
    def __init__(self, prompt_id: _Optional[str] = ..., trajectories: _Optional[_Iterable[_Union[TrainedTrajectory, _Mapping]]] = ...) -> None: ...

class TrainedTrajectory(_message.Message):
    __slots__ = ("logprobs", "advantages")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    advantages: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., advantages: _Optional[bytes] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("edges", "counts")
    EDGES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    edges: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, edges: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeSendRequest(_message.Message):
    __slots__ = ("job_id", "dtype", "content")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    dtype: str
    content: _weights_pb2.Content
    def __init__(self, job_id: _Optional[str] = ..., dtype: _Optional[str] = ..., content: _Optional[_Union[_weights_pb2.Content, str]] = ...) -> None: ...

class DescribeSendResponse(_message.Message):
    __slots__ = ("manifest", "layouts", "gpu", "deltas")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    manifest: _weights_pb2.Manifest
    layouts: _weights_pb2.Layouts
    gpu: bool
    deltas: bool
    def __init__(self, manifest: _Optional[_Union[_weights_pb2.Manifest, _Mapping]] = ..., layouts: _Optional[_Union[_weights_pb2.Layouts, _Mapping]] = ..., gpu: bool = ..., deltas: bool = ...) -> None: ...

class PrepareSendRequest(_message.Message):
    __slots__ = ("publication", "path", "receivers", "dtype", "deadline_s", "sides", "gpu", "content")
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SIDES_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    publication: _weights_pb2.PublicationRef
    path: _weights_pb2.Path
    receivers: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Receiver]
    dtype: str
    deadline_s: float
    sides: _weights_pb2.Sides
    gpu: bool
    content: _weights_pb2.Content
    def __init__(self, publication: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ..., path: _Optional[_Union[_weights_pb2.Path, str]] = ..., receivers: _Optional[_Iterable[_Union[_weights_pb2.Receiver, _Mapping]]] = ..., dtype: _Optional[str] = ..., deadline_s: _Optional[float] = ..., sides: _Optional[_Union[_weights_pb2.Sides, _Mapping]] = ..., gpu: bool = ..., content: _Optional[_Union[_weights_pb2.Content, str]] = ...) -> None: ...

class PrepareSendResponse(_message.Message):
    __slots__ = ("manifest", "rendezvous", "plan_hash", "base")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    manifest: _weights_pb2.Manifest
    rendezvous: _weights_pb2.Rendezvous
    plan_hash: bytes
    base: _weights_pb2.PublicationRef
    def __init__(self, manifest: _Optional[_Union[_weights_pb2.Manifest, _Mapping]] = ..., rendezvous: _Optional[_Union[_weights_pb2.Rendezvous, _Mapping]] = ..., plan_hash: _Optional[bytes] = ..., base: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ...) -> None: ...

class TransferSendRequest(_message.Message):
    __slots__ = ("publication", "whole")
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    publication: _weights_pb2.PublicationRef
    whole: bool
    def __init__(self, publication: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ..., whole: bool = ...) -> None: ...

class TransferSendResponse(_message.Message):
    __slots__ = ("checksums", "report")
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    checksums: _weights_pb2.Checksums
    report: _weights_pb2.MemberReport
    def __init__(self, checksums: _Optional[_Union[_weights_pb2.Checksums, _Mapping]] = ..., report: _Optional[_Union[_weights_pb2.MemberReport, _Mapping]] = ...) -> None: ...

class FinishSendRequest(_message.Message):
    __slots__ = ("publication", "failure")
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    publication: _weights_pb2.PublicationRef
    failure: str
    def __init__(self, publication: _Optional[_Union[_weights_pb2.PublicationRef, _Mapping]] = ..., failure: _Optional[str] = ...) -> None: ...

class FinishSendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("job_id", "path", "huggingface")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HUGGINGFACE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    path: str
    huggingface: bool
    def __init__(self, job_id: _Optional[str] = ..., path: _Optional[str] = ..., huggingface: bool = ...) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("version", "seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    seconds: float
    def __init__(self, version: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class FinishSaveRequest(_message.Message):
    __slots__ = ("job_id", "path")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    path: str
    def __init__(self, job_id: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class FinishSaveResponse(_message.Message):
    __slots__ = ("version", "bytes", "seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    bytes: int
    seconds: float
    def __init__(self, version: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("job_id", "path")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    path: str
    def __init__(self, job_id: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class CopyStateRequest(_message.Message):
    __slots__ = ("job_id", "version", "receivers")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    version: int
    receivers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_id: _Optional[str] = ..., version: _Optional[int] = ..., receivers: _Optional[_Iterable[str]] = ...) -> None: ...

class CopyStateResponse(_message.Message):
    __slots__ = ("version", "seconds", "rendezvous")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    version: int
    seconds: float
    rendezvous: _containers.RepeatedCompositeFieldContainer[_weights_pb2.Rendezvous]
    def __init__(self, version: _Optional[int] = ..., seconds: _Optional[float] = ..., rendezvous: _Optional[_Iterable[_Union[_weights_pb2.Rendezvous, _Mapping]]] = ...) -> None: ...

class ReceiveStateRequest(_message.Message):
    __slots__ = ("job_id", "configuration", "version", "rendezvous")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    configuration: str
    version: int
    rendezvous: _weights_pb2.Rendezvous
    def __init__(self, job_id: _Optional[str] = ..., configuration: _Optional[str] = ..., version: _Optional[int] = ..., rendezvous: _Optional[_Union[_weights_pb2.Rendezvous, _Mapping]] = ...) -> None: ...

class ReceiveStateResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class TrainerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainerStatus(_message.Message):
    __slots__ = ("member_id", "state", "job_id", "version", "world_size", "backend", "failure", "configuration", "microbatches_at_once")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    state: TrainerState
    job_id: str
    version: int
    world_size: int
    backend: str
    failure: str
    configuration: str
    microbatches_at_once: int
    def __init__(self, member_id: _Optional[str] = ..., state: _Optional[_Union[TrainerState, str]] = ..., job_id: _Optional[str] = ..., version: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., failure: _Optional[str] = ..., configuration: _Optional[str] = ..., microbatches_at_once: _Optional[int] = ...) -> None: ...
