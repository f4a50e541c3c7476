"""Sessions: the HTTP endpoint that agents speak to. Each episode of an agent is a session with a URL and a key."""
