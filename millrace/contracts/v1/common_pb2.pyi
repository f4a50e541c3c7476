from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_END_OF_TURN: _ClassVar[StopReason]
    STOP_REASON_STOP_STRING: _ClassVar[StopReason]
    STOP_REASON_LENGTH: _ClassVar[StopReason]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_EVALUATION: _ClassVar[Purpose]

class DropReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DROP_REASON_UNSPECIFIED: _ClassVar[DropReason]
    DROP_REASON_BAD_ROW: _ClassVar[DropReason]
    DROP_REASON_BAD_PROMPT: _ClassVar[DropReason]
    DROP_REASON_PROMPT_TOO_LONG: _ClassVar[DropReason]
    DROP_REASON_BAD_LOGPROBS: _ClassVar[DropReason]
    DROP_REASON_REWARD_FAILED: _ClassVar[DropReason]
    DROP_REASON_INCOMPLETE_GROUP: _ClassVar[DropReason]
    DROP_REASON_MALFORMED_GROUP: _ClassVar[DropReason]
    DROP_REASON_REPLICA_FAILED: _ClassVar[DropReason]
    DROP_REASON_NO_SIGNAL: _ClassVar[DropReason]
    DROP_REASON_JOB_SUCCEEDED: _ClassVar[DropReason]
    DROP_REASON_JOB_FAILED: _ClassVar[DropReason]
    DROP_REASON_JOB_CANCELLED: _ClassVar[DropReason]
    DROP_REASON_GROUP_TOO_LARGE: _ClassVar[DropReason]
    DROP_REASON_ENVIRONMENT_FAILED: _ClassVar[DropReason]
    DROP_REASON_KILLED_REPLICAS: _ClassVar[DropReason]
    DROP_REASON_TOO_STALE: _ClassVar[DropReason]
    DROP_REASON_JOB_PREEMPTED: _ClassVar[DropReason]

class EpisodeEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EPISODE_END_UNSPECIFIED: _ClassVar[EpisodeEnd]
    EPISODE_END_DONE: _ClassVar[EpisodeEnd]
    EPISODE_END_TURNS: _ClassVar[EpisodeEnd]
    EPISODE_END_TOKENS: _ClassVar[EpisodeEnd]
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_END_OF_TURN: StopReason
STOP_REASON_STOP_STRING: StopReason
STOP_REASON_LENGTH: StopReason
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAIN: Purpose
PURPOSE_EVALUATION: Purpose
DROP_REASON_UNSPECIFIED: DropReason
DROP_REASON_BAD_ROW: DropReason
DROP_REASON_BAD_PROMPT: DropReason
DROP_REASON_PROMPT_TOO_LONG: DropReason
DROP_REASON_BAD_LOGPROBS: DropReason
DROP_REASON_REWARD_FAILED: DropReason
DROP_REASON_INCOMPLETE_GROUP: DropReason
DROP_REASON_MALFORMED_GROUP: DropReason
DROP_REASON_REPLICA_FAILED: DropReason
DROP_REASON_NO_SIGNAL: DropReason
DROP_REASON_JOB_SUCCEEDED: DropReason
DROP_REASON_JOB_FAILED: DropReason
DROP_REASON_JOB_CANCELLED: DropReason
DROP_REASON_GROUP_TOO_LARGE: DropReason
DROP_REASON_ENVIRONMENT_FAILED: DropReason
DROP_REASON_KILLED_REPLICAS: DropReason
DROP_REASON_TOO_STALE: DropReason
DROP_REASON_JOB_PREEMPTED: DropReason
EPISODE_END_UNSPECIFIED: EpisodeEnd
EPISODE_END_DONE: EpisodeEnd
EPISODE_END_TURNS: EpisodeEnd
EPISODE_END_TOKENS: EpisodeEnd

class Drop(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: DropReason
    detail: str
    def __init__(self, reason: _Optional[_Union[DropReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("start", "end", "stop_reason", "reward", "temperature", "given_text", "text")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    stop_reason: StopReason
    reward: float
    temperature: float
    given_text: str
    text: str
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., reward: _Optional[float] = ..., temperature: _Optional[float] = ..., given_text: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("tokens", "logprobs", "versions", "stop_reason", "text", "reward", "reward_details", "reward_failure", "experts", "turns", "prompt_tokens", "prompt_text", "metadata", "account", "teacher")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_DETAILS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FAILURE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    logprobs: bytes
    versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    stop_reason: StopReason
    text: str
    reward: float
    reward_details: str
    reward_failure: str
    experts: Experts
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    prompt_tokens: bytes
    prompt_text: str
    metadata: str
    account: EpisodeAccount
    teacher: TokenScores
    def __init__(self, tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., text: _Optional[str] = ..., reward: _Optional[float] = ..., reward_details: _Optional[str] = ..., reward_failure: _Optional[str] = ..., experts: _Optional[_Union[Experts, _Mapping]] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., prompt_tokens: _Optional[bytes] = ..., prompt_text: _Optional[str] = ..., metadata: _Optional[str] = ..., account: _Optional[_Union[EpisodeAccount, _Mapping]] = ..., teacher: _Optional[_Union[TokenScores, _Mapping]] = ...) -> None: ...

class TokenScores(_message.Message):
    __slots__ = ("logprobs", "top_tokens", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    top_tokens: bytes
    top_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., top_tokens: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class EpisodeAccount(_message.Message):
    __slots__ = ("end", "tool_calls", "tool_failures", "tool_s", "reruns", "prefix_tokens", "cached_prefix_tokens", "held_back_s", "open_episodes", "episode_limit")
    END_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_FAILURES_FIELD_NUMBER: _ClassVar[int]
    TOOL_S_FIELD_NUMBER: _ClassVar[int]
    RERUNS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_BACK_S_FIELD_NUMBER: _ClassVar[int]
    OPEN_EPISODES_FIELD_NUMBER: _ClassVar[int]
    EPISODE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    end: EpisodeEnd
    tool_calls: int
    tool_failures: int
    tool_s: float
    reruns: int
    prefix_tokens: int
    cached_prefix_tokens: int
    held_back_s: float
    open_episodes: int
    episode_limit: int
    def __init__(self, end: _Optional[_Union[EpisodeEnd, str]] = ..., tool_calls: _Optional[int] = ..., tool_failures: _Optional[int] = ..., tool_s: _Optional[float] = ..., reruns: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., cached_prefix_tokens: _Optional[int] = ..., held_back_s: _Optional[float] = ..., open_episodes: _Optional[int] = ..., episode_limit: _Optional[int] = ...) -> None: ...

class Experts(_message.Message):
    __slots__ = ("chosen", "layers", "per_token", "wide")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WIDE_FIELD_NUMBER: _ClassVar[int]
    chosen: bytes
    layers: int
    per_token: int
    wide: bool
    def __init__(self, chosen: _Optional[bytes] = ..., layers: _Optional[int] = ..., per_token: _Optional[int] = ..., wide: bool = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("job_id", "prompt_id", "purpose", "data_source", "prompt_tokens", "prompt_text", "ground_truth", "trajectories", "member_id", "engine", "generate_s", "score_s", "greedy_reward", "episode_trajectories", "traceparent", "issued_s", "cancelled_episodes", "failed_episodes", "question", "images", "image_mark")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_S_FIELD_NUMBER: _ClassVar[int]
    GREEDY_REWARD_FIELD_NUMBER: _ClassVar[int]
    EPISODE_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ISSUED_S_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_EPISODES_FIELD_NUMBER: _ClassVar[int]
    FAILED_EPISODES_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_MARK_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    prompt_id: str
    purpose: Purpose
    data_source: str
    prompt_tokens: bytes
    prompt_text: str
    ground_truth: str
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    member_id: str
    engine: str
    generate_s: float
    score_s: float
    greedy_reward: float
    episode_trajectories: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    issued_s: float
    cancelled_episodes: int
    failed_episodes: int
    question: str
    images: _containers.RepeatedScalarFieldContainer[bytes]
    image_mark: str
    def __init__(self, job_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., data_source: _Optional[str] = ..., prompt_tokens: _Optional[bytes] = ..., prompt_text: _Optional[str] = ..., ground_truth: _Optional[str] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ..., member_id: _Optional[str] = ..., engine: _Optional[str] = ..., generate_s: _Optional[float] = ..., score_s: _Optional[float] = ..., greedy_reward: _Optional[float] = ..., episode_trajectories: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., issued_s: _Optional[float] = ..., cancelled_episodes: _Optional[int] = ..., failed_episodes: _Optional[int] = ..., question: _Optional[str] = ..., images: _Optional[_Iterable[bytes]] = ..., image_mark: _Optional[str] = ...) -> None: ...
