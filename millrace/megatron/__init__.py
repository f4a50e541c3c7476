"""What is known of a Megatron job without starting it: topology, rules, and each rank's layout in Hugging Face names.

Imports neither torch nor megatron, so a wrong configuration is refused at submission, and benchmarks can plan a
publication without ranks. The code that trains is in `services/trainer/backends/megatron`.
"""
