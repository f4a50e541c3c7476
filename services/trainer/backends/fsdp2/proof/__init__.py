"""Shows with a tiny model of an architecture that packed sequences get what each gets alone in transformers."""
