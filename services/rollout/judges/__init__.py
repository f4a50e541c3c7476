"""Judges: language models behind OpenAI-compatible endpoints that score answers."""
