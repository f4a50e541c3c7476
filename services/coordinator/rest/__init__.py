"""The REST API for people and programs, and the page that shows it."""
