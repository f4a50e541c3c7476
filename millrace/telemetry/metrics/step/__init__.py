"""Declarations of the step metrics: a file for each subject, and in it one `StepMetric` for each key or family."""
