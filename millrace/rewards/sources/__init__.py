"""The rule by which answers to a prompt are scored, chosen by its data source."""
