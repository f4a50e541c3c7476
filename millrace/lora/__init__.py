"""The adapter that a job asks for, as far as it is known without a model: its options, and which layers get one.
Torch-free, so that coordinator, trainer and replicas agree."""
