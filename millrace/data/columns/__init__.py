"""From the columns that a file has to the parts of a prompt row: which is what, and the values in them."""
