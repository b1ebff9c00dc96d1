"""sweep.png: the final validation loss against each axis."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solotune.config.nodes import Scalar, scalar_value

from .sweep_folder import Row, compared
from .sweep_result import DIVERGED

_LOG_FROM = 8  # times the smallest value: a wider axis is logarithmic
_TICKS = 8  # values of an axis, at most, that are all named
_MARKERS = "o^sDvP*X"  # and as many colors: more values of an axis are not told apart


def draw(rows: Sequence[Row], path: Path) -> str | None:
    """Write the picture; return a sentence instead where there is nothing to draw, or no library.

    One panel an axis, a point a run, a line through runs that differ in this axis alone, a color
    for each value of the next axis; runs that diverged are crosses at the upper edge.
    """
    points = [(row, loss) for row in rows if (loss := compared(row)) is not None]
    if not points:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        return f"{path} needs matplotlib: pip install 'solotune[plot]'"
    from matplotlib.figure import Figure

    keys = list(rows[0].values)
    figure = Figure(figsize=(4.2 * len(keys), 3.8), layout="constrained")
    panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for panel, key in zip(panels, keys, strict=True):
        _draw_axis(panel, key, keys, points, [row for row in rows if row.status == DIVERGED])
    validated = any(row.numbers.get("val_loss") is not None for row, _ in points)
    panels[0].set_ylabel("final validation loss" if validated else "final training loss")
    figure.savefig(path, dpi=110)
    return None


def _draw_axis(
    panel: Any, key: str, keys: Sequence[str], points: Sequence[tuple[Row, float]], lost: list[Row]
) -> None:
    place = _places([row.values[key] for row in [*(row for row, _ in points), *lost]])
    others = [other for other in keys if other != key]
    by_others: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row, loss in points:
        group = by_others.setdefault(tuple(row.values[other] for other in others), [])
        group.append((place[row.values[key]], loss))
    next_key = keys[(list(keys).index(key) + 1) % len(keys)]
    shades = list(dict.fromkeys(row.values[next_key] for row, _ in points))
    is_colored = bool(others) and len(shades) <= len(_MARKERS)
    for group, line in sorted(by_others.items()):
        shade = shades.index(group[others.index(next_key)]) if is_colored else 0
        xs, ys = zip(*sorted(line), strict=True)
        panel.plot(xs, ys, f"{_MARKERS[shade]}-", color=f"C{shade}", linewidth=1, alpha=0.8)
    if lost:
        xs = [place[row.values[key]] for row in lost]
        edge = panel.get_xaxis_transform()
        panel.plot(xs, [0.97] * len(xs), "x", color="black", transform=edge, label="diverged")
    if is_colored:
        for number, shade in enumerate(shades):
            style = f"{_MARKERS[number]}-"
            panel.plot([], [], style, color=f"C{number}", label=f"{next_key}={shade}")
    if lost or is_colored:
        panel.legend(fontsize=8)
    panel.set_xlabel(key)
    panel.grid(alpha=0.3)
    panel.margins(x=0.1, y=0.12)
    if max(place.values()) >= _LOG_FROM * min(place.values()) > 0:
        panel.set_xscale("log")
    if len(place) <= _TICKS:
        panel.set_xticks(list(place.values()), list(place), rotation=20 if len(place) > 4 else 0)
        panel.set_xticks([], minor=True)


def _places(values: Sequence[str]) -> dict[str, float]:
    """Return where each value stands: at its number, if all are above 0, else one after another."""
    read = {value: scalar_value(Scalar(value)) for value in values}
    numbers = {
        value: float(number)
        for value, number in read.items()
        if isinstance(number, int | float) and not isinstance(number, bool) and number > 0
    }
    if len(numbers) == len(read):
        return numbers
    return {value: float(place) for place, value in enumerate(read)}
