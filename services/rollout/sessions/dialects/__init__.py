"""What clients say to a session: OpenAI's chat completions and responses, Anthropic's messages, and tokens."""
