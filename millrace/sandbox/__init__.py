"""Runs a user's code apart from the service that needs its result: own processes, files, network, user and limits."""
