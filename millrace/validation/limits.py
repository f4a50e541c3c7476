"""The smallest and largest numbers that a job may ask for, where several fields share them.

They lie far beyond what anybody trains with. They keep a mistyped number from costing memory or time without end, and
every number that is accepted fits the types of the wire, the store and the libraries that get it.
"""

MOST_STEPS = 1_000_000_000
"""Training steps, and passes over the data."""
MOST_TOKENS = 10_000_000
"""Tokens of one prompt, or of one answer."""
MOST_SAMPLES = 4096
"""Answers to one prompt."""
MOST_IN_FLIGHT = 1_000_000
"""Prompts that are issued and not trained yet."""
MOST_TRAJECTORIES = 10_000_000
"""Trajectories of one step, or of one evaluation."""
LARGEST_SEED = 2**32 - 1
"""Seeds that every library takes."""
SHORTEST_S, LONGEST_S = 0.1, 604_800.0
"""Seconds of a deadline: up to a week."""
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
"""Sampling temperatures other than 0. vLLM raises lower ones to 0.01, and its log-probabilities would not be those of
the temperature that the trainer computes with."""
LARGEST_WEIGHT = 1_000.0
"""Coefficients of terms of a loss or a reward."""
LARGEST_NUMBER = 1e9
"""Free numbers, such as the options of algorithms."""
SMALLEST_POSITIVE = 1e-12
"""Numbers that have to be above 0: smaller ones vanish in float32."""
MOST_RANKS = 65_536
"""Sizes of parallelism."""
