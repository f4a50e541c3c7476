"""The host of environments written for `verifiers`: a process with a virtual environment of its own, which the replicas
ask for episodes. It imports nothing of the other services, and of what they share only `millrace/wire/reach.py`; its
packages are those of verifiers."""
