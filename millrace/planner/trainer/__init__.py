"""Seconds of the trainer: of a layer, of a pass, of a step."""
