"""Layers with experts: dispatch of tokens to them, load balance, and replay of the engine's routing."""
