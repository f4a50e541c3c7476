"""Who may work on what: leases and the queue."""
