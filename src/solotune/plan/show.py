"""A plan in words, as JSON, and as a picture."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solotune.memory.report import COLORS
from solotune.plan.budget import Budget
from solotune.plan.device_profile import DeviceProfile
from solotune.plan.needs import GIB, Needs, Planned

_NAMES = {"logits": "logits and loss", "context": "context and holes"}
_COLORS = COLORS | {"workspace": "#4d4d4d", "context": "#d0d0d0"}  # and holes in between


def lines(
    planned: Planned, budget: Budget, profile: DeviceProfile | None, *, assumed: Sequence[str]
) -> list[str]:
    """Return the printed lines of a plan."""
    needs = planned.needs
    found = [f"{numbers(needs.parameters)} parameters, {numbers(needs.trained)} of them trained"]
    found += [f"assumed: {fact}" for fact in assumed]
    title = "device memory" if needs.kind != "cpu" else "memory (CPU: device and host are one)"
    found += ["", f"{title:<34}{'GiB':>8}"]
    found += [
        f"  {_NAMES.get(name, name):<32}{size / GIB:>8.2f}"
        for name, size in needs.device.items()
        if size >= GIB // 1000
    ]
    bound = ", at most: compiled code holds less" if needs.is_upper_bound else ""
    found.append(f"  {'peak, in ' + needs.phase:<32}{needs.peak / GIB:>8.2f}{bound}")
    if needs.kind != "cpu":
        found.append(f"  {'reserved, with the context':<32}{needs.reserved / GIB:>8.2f}"
                     f"{_of(budget.device)}")  # fmt: skip
        found += ["", f"{'host memory':<34}{'GiB':>8}"]
        found.append(f"  {'pinned':<32}{needs.pinned / GIB:>8.2f}")
        held = ", ".join(name for name, size in needs.host.items() if size)
        found.append(f"  {'pageable':<32}{needs.pageable / GIB:>8.2f}"
                     f"{f'  the process, {held}' if held else '  the process'}")  # fmt: skip
    found.append(f"  {'in all':<32}{needs.host_total / GIB:>8.2f}{_of(budget.host)}")
    found += ["", f"{'disk':<34}{'GiB':>8}"]
    found += [f"  {name:<32}{size / GIB:>8.2f}" for name, size in needs.disk.items()]
    found.append(f"  {'in all':<32}{needs.disk_total / GIB:>8.2f}{_of(budget.disk)}")
    found.append(f"  {'written each step':<32}{needs.disk_written / GIB:>8.2f}")
    if needs.kind != "cpu":
        found += ["", f"{'over the bus, each step':<34}{'GiB':>8}"]
        found.append(f"  {'to the device':<32}{needs.to_device / GIB:>8.2f}")
        found.append(f"  {'to the host':<32}{needs.to_host / GIB:>8.2f}")
    found += ["", f"a step: {needs.tokens:,} tokens, {needs.operations / 1e12:,.1f} TFLOP"]
    if profile is not None:
        seconds = planned.seconds(profile)
        how = "measured" if profile.measured else "by its data sheet"
        found.append(
            f"  at best {needs.tokens / seconds:,.0f} tokens/s, {seconds:.3g} s a step on "
            f"{profile.name} ({how})"
        )
    else:
        found.append("  time: name a device, --device-profile 4090 | measured | file.yaml")
    if faults := budget.faults(needs):
        found += ["", *(f"does not fit: {fault}" for fault in faults)]
    elif budget.is_set:
        found += ["", "fits"]
    return found


def as_json(
    planned: Planned, budget: Budget, profile: DeviceProfile | None, *, assumed: Sequence[str]
) -> dict[str, Any]:
    """Return the plan as one object; sizes in bytes."""
    needs = planned.needs
    found: dict[str, Any] = dataclasses.asdict(needs) | {
        "peak": needs.peak,
        "host_total": needs.host_total,
        "disk_total": needs.disk_total,
        "assumed": list(assumed),
        "budget": dataclasses.asdict(budget),
        "does_not_fit": budget.faults(needs),
    }
    if profile is not None:
        seconds = planned.seconds(profile)
        found |= {
            "device_profile": profile.name,
            "seconds_per_step": seconds,
            "tokens_per_second": needs.tokens / seconds,
        }
    return found


def draw(plans: dict[str, Needs], path: Path, *, budget: Budget, title: str) -> None:
    """Write a picture: a bar a plan, its categories stacked, against the line of the budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.9 + 0.55 * len(plans)), layout="constrained")
    panel = figure.subplots()
    left = [0.0] * len(plans)
    names = list(_COLORS)
    for name in names:
        sizes = [_part(needs, name) / GIB for needs in plans.values()]
        if any(sizes):
            label = _NAMES.get(name, name)
            panel.barh(list(plans), sizes, left=left, color=_COLORS[name], label=label, height=0.6)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, end in enumerate(left):
        panel.text(end, row, f" {end:.2f}", va="center")
    widest = max(left)
    if budget.device is not None:
        widest = max(widest, budget.device / GIB)
        panel.axvline(budget.device / GIB, color="#b2182b", linestyle="--", linewidth=1.2)
        panel.annotate(
            f"{budget.device / GIB:.1f} GiB",
            (budget.device / GIB, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color="#b2182b",
        )
    panel.set(xlabel="GiB on the device at its peak", xlim=(0, 1.12 * widest))
    panel.set_title(title, pad=18 if budget.device is not None else 6)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def _part(needs: Needs, name: str) -> int:
    if name == "context":
        return needs.reserved - needs.peak
    return needs.device.get(name, 0)


def numbers(count: int) -> str:
    """Return a number of parameters as people say it."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:,}"


def _of(budget: int | None) -> str:
    return "" if budget is None else f"  of {budget / GIB:.2f}"
