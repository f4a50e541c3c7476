"""Process groups, packing of micro-batches, context parallelism and the pipeline schedule."""
