"""The host of environments written for `verifiers`: a process with a virtual environment of its own, which the replicas
ask for episodes. It imports nothing of the other services, and its packages are those of verifiers."""
