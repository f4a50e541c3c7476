"""Mutual TLS: who this process is, whom it trusts, and why a connection was refused.

    MILLRACE_TLS_CERT=/etc/millrace/tls.crt MILLRACE_TLS_KEY=/etc/millrace/tls.key MILLRACE_TLS_CA=/etc/millrace/ca.crt

With these every server and every client of the process speaks TLS, on the loopback too. Without them none does.
"""

from millrace.wire.tls.files import Use
from millrace.wire.tls.own import Identity, identity, scheme, server_context, trusted_by_host, verifying

__all__ = ["Identity", "Use", "identity", "scheme", "server_context", "trusted_by_host", "verifying"]
