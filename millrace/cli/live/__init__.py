"""Commands that show a coordinator live in the terminal: `watch` one job, `top` all jobs and the fleet."""
