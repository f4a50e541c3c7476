"""The Prometheus metrics that the services serve at `/metrics`, a file for each owner.

- `every_service` declares what all services have: the build, the process, gRPC calls.
- `members` declares what trainer and replicas have, `trainer`, `replica` and `coordinator` what only one of them has.
- `registry` has all declarations, and the registry that takes no others.
- `endpoint` serves the page of a trainer or of a replica.

`LEASES.on(registry).labels(job_id=...).inc()` records one. Names end in their unit, times are seconds and sizes bytes;
`_total` counts since the process started.
"""
