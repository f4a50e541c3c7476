"""What people and Prometheus see: events, samples, metrics."""
