"""What a judge is told, and how its scores are read: pure, no network."""
