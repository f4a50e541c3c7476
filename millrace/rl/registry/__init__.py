"""Which algorithms there are, the options each takes, and how a name becomes a function."""
