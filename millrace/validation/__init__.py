"""From what a user wrote to checked values: the base of all models, their errors in plain words, misspelt names."""
