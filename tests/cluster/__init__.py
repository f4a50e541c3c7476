"""The stack started by other people's schedulers: a real Slurm, and what Helm makes of the chart."""
