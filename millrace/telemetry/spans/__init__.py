"""Spans: what a service did for a job, from when to when.

Every service records its spans in a `Recorder` (recorder.py). From there they go two ways: over OTLP to a collector,
if one is configured (export.py), and in compact batches (batches.py) to the coordinator, which keeps those of the
last steps. A span belongs to a trace (context.py): each group has one, and each step.
"""
