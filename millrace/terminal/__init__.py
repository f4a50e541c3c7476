"""What is printed at a terminal: tables for people, JSON for programs, errors, and a job live."""
