"""The command of an agent: a program that the replica runs once for each episode."""
