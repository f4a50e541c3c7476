"""Environments that play episodes with the policy: a user's class, OpenEnv, MCP tools, and the runner."""
