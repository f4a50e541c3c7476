from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_IDLE: _ClassVar[NodeState]
    NODE_STATE_STARTING: _ClassVar[NodeState]
    NODE_STATE_RUNNING: _ClassVar[NodeState]
    NODE_STATE_FAILED: _ClassVar[NodeState]

class NodeOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_ORDER_UNSPECIFIED: _ClassVar[NodeOrder]
    NODE_ORDER_IDLE: _ClassVar[NodeOrder]
    NODE_ORDER_RUN: _ClassVar[NodeOrder]
    NODE_ORDER_LEAVE: _ClassVar[NodeOrder]
    NODE_ORDER_REJOIN: _ClassVar[NodeOrder]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_IDLE: NodeState
NODE_STATE_STARTING: NodeState
NODE_STATE_RUNNING: NodeState
NODE_STATE_FAILED: NodeState
NODE_ORDER_UNSPECIFIED: NodeOrder
NODE_ORDER_IDLE: NodeOrder
NODE_ORDER_RUN: NodeOrder
NODE_ORDER_LEAVE: NodeOrder
NODE_ORDER_REJOIN: NodeOrder

class JoinNodesRequest(_message.Message):
    __slots__ = ("node_rank", "nodes", "life", "host", "protocol_version", "engine", "engine_release")
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RELEASE_FIELD_NUMBER: _ClassVar[int]
    node_rank: int
    nodes: int
    life: str
    host: str
    protocol_version: int
    engine: str
    engine_release: str
    def __init__(self, node_rank: _Optional[int] = ..., nodes: _Optional[int] = ..., life: _Optional[str] = ..., host: _Optional[str] = ..., protocol_version: _Optional[int] = ..., engine: _Optional[str] = ..., engine_release: _Optional[str] = ...) -> None: ...

class JoinNodesResponse(_message.Message):
    __slots__ = ("generation", "lost_after_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOST_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    generation: str
    lost_after_s: float
    def __init__(self, generation: _Optional[str] = ..., lost_after_s: _Optional[float] = ...) -> None: ...

class NodeBeatRequest(_message.Message):
    __slots__ = ("generation", "life", "node_rank", "order", "state", "failure", "fix", "invalid_job", "draining")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    INVALID_JOB_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    generation: str
    life: str
    node_rank: int
    order: int
    state: NodeState
    failure: str
    fix: str
    invalid_job: bool
    draining: bool
    def __init__(self, generation: _Optional[str] = ..., life: _Optional[str] = ..., node_rank: _Optional[int] = ..., order: _Optional[int] = ..., state: _Optional[_Union[NodeState, str]] = ..., failure: _Optional[str] = ..., fix: _Optional[str] = ..., invalid_job: bool = ..., draining: bool = ...) -> None: ...

class NodeBeatResponse(_message.Message):
    __slots__ = ("order", "kind", "reason", "spec", "host", "port", "seed", "worker_rpc")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WORKER_RPC_FIELD_NUMBER: _ClassVar[int]
    order: int
    kind: NodeOrder
    reason: str
    spec: str
    host: str
    port: int
    seed: int
    worker_rpc: str
    def __init__(self, order: _Optional[int] = ..., kind: _Optional[_Union[NodeOrder, str]] = ..., reason: _Optional[str] = ..., spec: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., seed: _Optional[int] = ..., worker_rpc: _Optional[str] = ...) -> None: ...
