"""The list of algorithms, the options of each, and how a name in a job becomes a function."""
