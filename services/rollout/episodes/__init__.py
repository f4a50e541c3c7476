"""Episodes with an environment: the conversation as tokens, the processes of the user's class, the limits."""
