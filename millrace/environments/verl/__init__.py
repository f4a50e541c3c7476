"""Tools and interactions that were written for verl, as an environment."""
