"""Dropout and noise of models."""

from typing import Any

NOISE = ("dropout", "_pdrop", "layerdrop", "jitter_noise")
"""Endings of entries of configs."""


JITTER = ("jitter_noise",)
"""Endings of those that routers may use in generation too."""


def set_noise(config: Any, share: float, endings: tuple[str, ...] = NOISE) -> None:
    """Gives every entry with such an ending this value, those of the text part too."""
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if name.endswith(endings) and isinstance(value, float):
                setattr(part, name, share)
