"""The peak of a run by what it is for, a picture of it, and one sentence when memory is out.

Saves:    nothing: shows where it is.
Costs:    `log_memory=True`: the first two steps, and each later one that is larger than all before,
          take longer by about 0.05 ms an allocation, and by the drawing.
Excludes: nothing; a tracked step runs uncompiled.
Label:    bit-exact; with compile reordered, in the tracked steps. Figures: docs/memory_report.md
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from solotune.data import Batch
from solotune.memory.host import HostMemory
from solotune.memory.out_of_memory import explain_out_of_memory
from solotune.memory.stepping import Stepper
from solotune.memory.timeline import CATEGORIES, PLACES, Timeline
from solotune.memory.tracker import MemoryTracker
from solotune.models import Decoder
from solotune.training import RunLog

# Of one hue where they stay from step to step, of others where they come and go.
COLORS = {
    "weights": "#31688e",
    "optimizer state": "#6ba5c9",
    "gradients": "#e08214",
    "activations": "#5aae61",
    "logits": "#b2182b",
    "other": "#a0a0a0",
}
_PHASECOLORS = {"forward": "#ffffff", "backward": "#ececec", "step": "#d9d9d9"}


class Plan(Protocol):
    """What can say how high a run's peak would be with some keys changed, in bytes."""

    def peak_with(self, change: Mapping[str, Any]) -> int | None: ...


class MemoryReport:
    """Watches the steps of a run; `on` holds the values of MEMORY_KEYS."""

    def __init__(
        self,
        model: Decoder,
        *,
        loss_fn: nn.Module,
        stepper: Stepper,
        host: HostMemory,
        log: RunLog,
        on: Mapping[str, Any],
        plan: Plan | None = None,
    ) -> None:
        self.model, self.loss_fn, self.stepper, self.host = model, loss_fn, stepper, host
        self.log, self.on, self.plan = log, on, plan
        self._largest = (0, 0, False)
        self._peak_bytes = 0

    @contextmanager
    def step(self, number: int, group: Sequence[Batch]) -> Iterator[None]:
        """Explain a failing allocation inside; where it is due, track the step and report it.

        Raises UserError when memory is out.
        """
        peak_with = self.plan.peak_with if self.plan else None
        out_of_memory = explain_out_of_memory(
            self.model, stepper=self.stepper, on=self.on, peak_with=peak_with
        )
        if not self._is_due(group):
            with out_of_memory:
                yield
            return
        tracker = MemoryTracker(
            self.model, loss_fn=self.loss_fn, stepper=self.stepper, host=self.host
        )
        snapshot = self.log.output_dir / "memory_snapshot.pickle"
        with out_of_memory, _allocator(self.model.device, snapshot) as allocated, tracker:
            yield
        with self.log.uncounted():
            self._report(number, tracker.timeline(), allocated)

    def _is_due(self, group: Sequence[Batch]) -> bool:
        """Whether a step is larger than the tracked ones, or the first with optimizer state."""
        if not self.on["log_memory"]:
            return False
        sizes = [batch.tokens_BS.numel() for batch in group]
        this = (max(sizes), sum(sizes), bool(self.stepper.optimizer.state))
        due = any(new > old for new, old in zip(this, self._largest, strict=True))
        self._largest = tuple(map(max, this, self._largest))
        return due

    def _report(self, number: int, timeline: Timeline, allocated: dict[str, int]) -> None:
        peaks = {place: timeline.peak(place) for place in PLACES}
        if peaks["device"].num_bytes <= self._peak_bytes:
            return
        self._peak_bytes = peaks["device"].num_bytes
        if "allocator" in allocated:  # its events count from the start of the step
            allocated["allocator"] += int(timeline.total("device", "host")[0])
        row: dict[str, Any] = {"step": number}
        for place, peak in peaks.items():
            if peak.num_bytes:
                parts = {name: num for name, num in peak.by_category.items() if num}
                row[f"memory_{place}_gib"] = {name: num / 2**30 for name, num in parts.items()}
                shown = ", ".join(
                    f"{name} {size(num)}"
                    for name, num in parts.items()
                    if num * 1000 > peak.num_bytes
                )
                self.log.facts(
                    f"memory: at most {size(peak.num_bytes)} on {place}, in {peak.phase} of step "
                    f"{number}: {shown}"
                )
        for name, num in allocated.items():
            row[f"memory_{name}_gib"] = num / 2**30
            self.log.facts(f"memory: {name} at most {size(num)}")
        self.log.write(row)
        picture = self.log.output_dir / "memory.png"
        if importlib.util.find_spec("matplotlib") is None:
            self.log.facts(f"{picture} needs matplotlib: pip install 'solotune[plot]'")
            return
        draw(timeline, picture, title=f"Live memory in step {number}")
        self.log.facts(f"memory: {picture}")


def size(num_bytes: int) -> str:
    """Return a size as it is shown: in GiB, below one in MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def draw(timeline: Timeline, path: Path, *, title: str) -> None:
    """Write a picture: categories stacked over the step, the host below where it holds anything."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    places = [place for place in ("device", "host") if timeline.total(place).any()]
    figure = Figure(figsize=(10, 1.2 + 3.6 * len(places)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(places), sharex=True, squeeze=False)[:, 0]
    spans = _spans(timeline)
    end = float(timeline.seconds_E[-1])
    for panel, place in zip(panels, places, strict=True):
        peak, total = timeline.peak(place), timeline.total(place)
        name, unit = ("GiB", 2**30) if peak.num_bytes >= 2**30 else ("MiB", 2**20)
        for first, last, phase in spans:
            panel.axvspan(first, last, color=_PHASECOLORS[phase], linewidth=0, zorder=0)
            if panel is panels[0] and last - first > 0.08 * end:
                panel.text((first + last) / 2, 1.01, phase, ha="center", va="bottom", alpha=0.7,
                           transform=panel.get_xaxis_transform())  # fmt: skip
        series = [timeline.bytes_E[place, category] / unit for category in CATEGORIES]
        colors = [COLORS[category] for category in CATEGORIES]
        panel.stackplot(timeline.seconds_E, *series, colors=colors, step="post", linewidth=0)
        moment = float(timeline.seconds_E[int(total.argmax())])
        panel.axvline(moment, color="black", linewidth=0.8, linestyle="--")
        panel.axhline(peak.num_bytes / unit, color="black", linewidth=0.8, linestyle="--")
        on_left = moment > 0.6 * end
        panel.annotate(
            f"peak {size(peak.num_bytes)}",
            (moment, peak.num_bytes / unit),
            xytext=(-6 if on_left else 6, 4),
            textcoords="offset points",
            ha="right" if on_left else "left",
        )
        panel.set(
            ylabel=f"on {place}, {name}", xlim=(0, end), ylim=(0, peak.num_bytes / unit * 1.12)
        )
    panels[-1].set_xlabel("seconds (a tracked step is slower than others)")
    shown = [c for c in CATEGORIES if any(timeline.bytes_E[place, c].any() for place in places)]
    handles = [Patch(color=COLORS[category], label=category) for category in reversed(shown)]
    handles += [
        Patch(facecolor=color, edgecolor="#808080", label=phase)
        for phase, color in _PHASECOLORS.items()
    ]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)


def _spans(timeline: Timeline) -> list[tuple[float, float, str]]:
    """Return (first, last, phase) of each stretch of one phase, in seconds."""
    spans: list[tuple[float, float, str]] = []
    for moment, phase in zip(timeline.seconds_E.tolist(), timeline.phases, strict=True):
        if spans and spans[-1][2] == phase:
            spans[-1] = (spans[-1][0], moment, phase)
        else:
            spans.append((spans[-1][1] if spans else 0.0, moment, phase))
    return spans


@contextmanager
def _allocator(device: torch.device, snapshot: Path) -> Iterator[dict[str, int]]:
    """Yield what holds the allocator's own peaks after the end: on CPU above the start's bytes.

    On a card its history is written to `snapshot`, for pytorch.org/memory_viz.
    """
    peaks: dict[str, int] = {}
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=200_000)
        try:
            yield peaks
        finally:
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
        peaks["allocated"] = torch.cuda.max_memory_allocated(device)
        peaks["reserved"] = torch.cuda.max_memory_reserved(device)
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peaks
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    events = sorted(
        (event for event in events if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    peaks["allocator"] = max(accumulate((event.nbytes() for event in events), initial=0))
