"""Checks of values that many recipes share."""

from typing import Any

from solotune.errors import ConfigError


def check_positive(cfg: Any, keys: str) -> None:
    """Raise ConfigError where one of the `keys`, parted by spaces, holds a number not above 0."""
    for key in keys.split():
        value = getattr(cfg, key)
        if value is not None and not value > 0:
            raise ConfigError(f"{key}={value}: use a number above 0")
