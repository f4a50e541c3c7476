"""What clients ask over HTTP and are answered, in the words of OpenAI, Anthropic and vLLM."""
