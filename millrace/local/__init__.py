"""The whole system on one machine, supervised: a coordinator, the trainer's ranks and some replicas.

Three processes stand between a terminal and the services, so that no single SIGKILL leaves anything behind:

    watchdog    (child_processes.py)  waits; when the supervisor is gone it ends every process below itself
    supervisor  (supervisor.py)       starts, watches, restarts and stops the services in order
    services    coordinator (with its Redis), trainer (launcher and ranks), replicas (with their engines)

`Stack` (stack.py) is the same thing as a context manager, for programs and tests.
"""
