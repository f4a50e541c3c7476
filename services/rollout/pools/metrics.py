"""The page for Prometheus of a pool's replica."""

from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import replica as names
from millrace.telemetry.metrics.prometheus.every_service import describe_process
from millrace.telemetry.metrics.prometheus.members import MEMBER_TOKENS, describe_gpus, describe_member
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from services.rollout.pools.replica import PoolReplica


class PoolMetrics:
    """What Prometheus reads of one replica of a pool."""

    def __init__(self, replica: PoolReplica) -> None:
        self.registry = DeclaredRegistry(Owner.REPLICA)
        describe_process(self.registry, Owner.REPLICA)
        self._replica = replica
        self._counted_tokens = 0

    def refresh(self) -> None:
        """Sets every gauge to what the replica is now. On the replica's event loop."""
        replica = self._replica
        running, waiting = replica.load()
        names.ENGINE_RUNNING.on(self.registry).set(running)
        names.ENGINE_WAITING.on(self.registry).set(waiting)
        names.DRAINING.on(self.registry).set(replica.draining.is_set())
        describe_gpus(self.registry, [(replica.usage.host, reading) for reading in replica.usage.gpus.latest])
        MEMBER_TOKENS.on(self.registry).inc(replica.tokens - self._counted_tokens)
        self._counted_tokens = replica.tokens
        describe_member(
            self.registry,
            member=replica.member_id,
            engine=replica.engine_name,
            engine_release=replica.engine_release,
            job_id=replica.job_id,
            version=None,
        )
