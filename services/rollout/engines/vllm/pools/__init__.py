"""vLLM as the engine of pools, with models of their own."""
