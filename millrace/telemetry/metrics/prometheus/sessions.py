"""Prometheus metrics of a replica's sessions, which agents play over HTTP."""

from millrace.telemetry.metrics.declaration import Unit
from millrace.telemetry.metrics.prometheus.declaration import SHORT_S, counter, gauge, histogram

OPEN = gauge("millrace_sessions_open", Unit.COUNT, "Sessions that are open, those that wait for an agent included.")
WAITING = gauge("millrace_sessions_waiting", Unit.COUNT, "Of these, sessions that no agent has claimed yet.")
REQUESTS = counter(
    "millrace_session_requests_total",
    Unit.COUNT,
    "Requests of agents by what they ask for and the status of the answer: 429 if no episode waits for an agent, "
    "499 if the agent went away. A stream that has begun counts as 200.",
    "api",
    "status",
)
OVERHEAD_S = histogram(
    "millrace_session_overhead_seconds",
    Unit.SECONDS,
    "What the endpoint adds to a turn: from the last byte of the request until the answer is made, less the seconds in "
    "the engine.",
    SHORT_S,
    "api",
)
ABANDONED = counter(
    "millrace_sessions_abandoned_total",
    Unit.COUNT,
    "Sessions whose time (episode_s) was over before their agent had ended them.",
)
