"""What can be said of a Megatron job without starting it: options, topology, rules, and each rank's layout in Hugging
Face terms. Imports neither torch nor megatron: a bad configuration is refused where it is submitted, and a plan for a
publication needs no rank's help. What runs is in `services/trainer/backends/megatron`.
"""
