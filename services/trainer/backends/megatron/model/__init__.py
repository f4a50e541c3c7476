"""The parts of the model on a rank: configuration, layers, and the chunks of the pipeline."""
