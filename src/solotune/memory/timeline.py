"""Live bytes over a step, by what they are for and where they are."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# "optimizer state" includes what a step of it needs for a moment, "weights" the buffers.
CATEGORIES = ("weights", "optimizer state", "gradients", "activations", "logits", "other")
PLACES = ("device", "host", "disk")


class Peak(NamedTuple):
    """The moment of the most bytes in one place."""

    num_bytes: int
    phase: str  # forward, backward or step
    by_category: dict[str, int]  # at that moment
    highest: dict[str, int]  # of each category, at a moment of its own


@dataclass(frozen=True)
class Timeline:
    """Live bytes after each allocation and each end of one; E of them, the first is the start."""

    seconds_E: np.ndarray
    phases: list[str]  # of each: forward, backward or step
    bytes_E: dict[tuple[str, str], np.ndarray]  # by (place, category)

    def at(self, moments: np.ndarray) -> "Timeline":
        """Return what was alive at some moments."""
        series = {key: values[moments] for key, values in self.bytes_E.items()}
        return Timeline(self.seconds_E[moments], [self.phases[m] for m in moments], series)

    def total(self, *places: str) -> np.ndarray:
        """Return live bytes over time, summed over `places`."""
        return np.sum([v for (place, _), v in self.bytes_E.items() if place in places], axis=0)

    def peak(self, place: str = "device") -> Peak:
        total = self.total(place)
        moment = int(total.argmax())
        series = {category: self.bytes_E[place, category] for category in CATEGORIES}
        return Peak(
            int(total[moment]),
            self.phases[moment],
            {category: int(values[moment]) for category, values in series.items()},
            {category: int(values.max()) for category, values in series.items()},
        )
