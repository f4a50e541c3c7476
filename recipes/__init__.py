"""Real data and job specs for Qwen3-0.6B, 1.7B and 8B: `python -m recipes --help`, and README.md in this folder.

`data_sets` converts GSM8K, DAPO-Math-17k and Geometry3K to verl's columns, `catalogue` lists the recipes and makes
their jobs, `expected` computes what they need, `run` starts one.
"""
