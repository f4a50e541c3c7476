"""Layers with experts: dispatch of tokens, balance, replayed routing."""
