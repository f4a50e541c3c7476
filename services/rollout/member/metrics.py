"""What Prometheus reads of every replica. Metrics are declared in millrace/telemetry/metrics/prometheus."""

from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import replica as names
from millrace.telemetry.metrics.prometheus.every_service import describe_process
from millrace.telemetry.metrics.prometheus.members import MEMBER_TOKENS, describe_gpus, describe_member
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from services.rollout.member.member import FleetMember


class MemberMetrics:
    """The page of one replica."""

    def __init__(self, member: FleetMember) -> None:
        self.registry = DeclaredRegistry(Owner.REPLICA)
        describe_process(self.registry, Owner.REPLICA)
        self._member = member
        self._counted_tokens = 0

    def refresh(self) -> None:
        """Sets every gauge to what the replica is now. On the replica's event loop."""
        member = self._member
        load = member.load()
        names.ENGINE_RUNNING.on(self.registry).set(load.running)
        names.ENGINE_WAITING.on(self.registry).set(load.waiting)
        names.DRAINING.on(self.registry).set(member.draining.is_set())
        describe_gpus(self.registry, [(member.usage.host, reading) for reading in member.usage.gpus.latest])
        tokens = member.tokens
        MEMBER_TOKENS.on(self.registry).inc(tokens - self._counted_tokens)
        self._counted_tokens = tokens
        describe_member(
            self.registry,
            member=member.member_id,
            engine=member.engine_name,
            engine_release=member.engine_release,
            job_id=member.job_name,
            version=member.version,
        )
