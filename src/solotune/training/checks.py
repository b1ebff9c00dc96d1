"""Checks of values that many recipes share."""

from typing import Any

from solotune.errors import ConfigError


def check_validation(val_fraction: float, dataset_val: object, *, patience: int | None) -> None:
    """Raise ConfigError for a share that is none, and for early stopping without validation."""
    if patience and not (val_fraction or dataset_val):
        raise ConfigError("early_stopping_patience needs val_fraction above 0, or dataset_val")
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction={val_fraction}: use 0 or more, and less than 1")


def check_positive(cfg: Any, keys: str) -> None:
    """Raise ConfigError where one of the `keys`, parted by spaces, holds a number not above 0."""
    for key in keys.split():
        value = getattr(cfg, key)
        if value is not None and not value > 0:
            raise ConfigError(f"{key}={value}: use a number above 0")
