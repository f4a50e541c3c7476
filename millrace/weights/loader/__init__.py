"""Learning where an engine's own loader puts each tensor."""
