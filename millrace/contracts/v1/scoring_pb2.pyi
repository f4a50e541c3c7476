from millrace.contracts.v1 import common_pb2 as _common_pb2
from millrace.contracts.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenSpan(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("tokens", "scored")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    scored: _containers.RepeatedCompositeFieldContainer[TokenSpan]
    def __init__(self, tokens: _Optional[bytes] = ..., scored: _Optional[_Iterable[_Union[TokenSpan, _Mapping]]] = ...) -> None: ...

class ScoreTokensRequest(_message.Message):
    __slots__ = ("job_id", "pool", "sequences", "top")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    pool: str
    sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    top: int
    def __init__(self, job_id: _Optional[str] = ..., pool: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., top: _Optional[int] = ...) -> None: ...

class ScoreTokensResponse(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenScores]
    def __init__(self, scores: _Optional[_Iterable[_Union[_common_pb2.TokenScores, _Mapping]]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("prompt", "answer")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    answer: str
    def __init__(self, prompt: _Optional[str] = ..., answer: _Optional[str] = ...) -> None: ...

class ScoreConversationsRequest(_message.Message):
    __slots__ = ("job_id", "pool", "conversations")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    pool: str
    conversations: _containers.RepeatedCompositeFieldContainer[Conversation]
    def __init__(self, job_id: _Optional[str] = ..., pool: _Optional[str] = ..., conversations: _Optional[_Iterable[_Union[Conversation, _Mapping]]] = ...) -> None: ...

class ConversationScore(_message.Message):
    __slots__ = ("reward", "failure")
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    reward: float
    failure: str
    def __init__(self, reward: _Optional[float] = ..., failure: _Optional[str] = ...) -> None: ...

class ScoreConversationsResponse(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[ConversationScore]
    def __init__(self, scores: _Optional[_Iterable[_Union[ConversationScore, _Mapping]]] = ...) -> None: ...

class ScoringStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScoringStatus(_message.Message):
    __slots__ = ("member_id", "pool", "state", "job_id", "running", "waiting", "tokens", "engine", "engine_release", "failure")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RELEASE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    pool: str
    state: _rollout_pb2.EngineState
    job_id: str
    running: int
    waiting: int
    tokens: int
    engine: str
    engine_release: str
    failure: str
    def __init__(self, member_id: _Optional[str] = ..., pool: _Optional[str] = ..., state: _Optional[_Union[_rollout_pb2.EngineState, str]] = ..., job_id: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., tokens: _Optional[int] = ..., engine: _Optional[str] = ..., engine_release: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...
