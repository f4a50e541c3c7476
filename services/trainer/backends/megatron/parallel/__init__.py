"""Process groups, context parallelism, packing and the pipeline schedule."""
