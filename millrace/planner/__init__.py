"""The planner: what a job would need and how long its steps would take on GPUs that are not there, from formulas
(docs/planner.md). Torch-free."""
