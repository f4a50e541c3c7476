"""Environments: what the policy talks to in an episode of several turns, written as a Python class. See
docs/environments.md."""

from millrace.environments.protocol import Environment, Message, Row, Step, ToolResult
from millrace.environments.tools import tool

__all__ = ["Environment", "Message", "Row", "Step", "ToolResult", "tool"]
