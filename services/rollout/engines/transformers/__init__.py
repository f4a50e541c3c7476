"""The Hugging Face Transformers engine."""
