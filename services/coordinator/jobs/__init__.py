"""What people ask of jobs, and the runner that carries it out."""
