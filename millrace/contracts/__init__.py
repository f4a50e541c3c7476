"""The generated messages and methods of the contracts, and what the fields of requests may hold."""
