"""Millrace: what the three services share. Importing this package pulls in neither torch nor an engine."""

__version__ = "0.2.0"
