"""What the memory of this rank holds, phase by phase, and what is said when it runs out."""
