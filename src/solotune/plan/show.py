"""A plan in words, as JSON, and as a picture."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solotune.memory.report import COLORS
from solotune.plan.budget import MARGIN, Budget
from solotune.plan.device_profile import DeviceProfile
from solotune.plan.needs import GIB, Needs, Planned
from solotune.plan.search import LABELS, Candidate, Found, overrides

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


def found_lines(found: Found, cfg: Any, budget: Budget) -> list[str]:
    """Return the printed lines of a search."""
    best = found.best
    words = list(overrides(cfg, best.values))
    if not best.fits:
        faults = "; ".join(budget.faults(best.planned.needs, margin=MARGIN))
        return [
            f"none of {found.tried} configurations fits with {MARGIN:.0%} to spare; the closest:",
            *(f"  {word}" for word in words),
            f"  {faults}",
            "take a smaller model, fewer tokens (tokenizer.max_seq_len), or train an adapter",
        ]
    found_text = [
        f"the fastest of {found.tried} configurations that fits, with {MARGIN:.0%} to spare:"
    ]
    if not words:
        found_text = [f"{found_text[0]} the given one"]
    for word in words:
        key = word.partition("=")[0].partition(".")[0]
        line = f"  {word:<40}{LABELS.get(key, '')}"
        if key in found.without:
            line += f"; without it {sizes(found.without[key].planned.needs)}"
        found_text.append(line)
    found_text.append(f"  {sizes(best.planned.needs)}{_time(best)}")
    if found.runner_up is not None:
        other = " ".join(overrides(cfg, found.runner_up.values)) or "as it is"
        needs = found.runner_up.planned.needs
        found_text += ["runner-up:", f"  {other}", f"  {sizes(needs)}{_time(found.runner_up)}"]
    return found_text


def found_as_json(found: Found, cfg: Any) -> dict[str, Any]:
    """Return the result of a search as one object."""

    def one(candidate: Candidate | None) -> dict[str, Any] | None:
        if candidate is None:
            return None
        needs = candidate.planned.needs
        return {
            "overrides": list(overrides(cfg, candidate.values)),
            "fits": candidate.fits,
            "reserved": needs.reserved,
            "host_total": needs.host_total,
            "disk_total": needs.disk_total,
            "seconds_per_step": candidate.seconds,
        }

    without = {key: one(candidate) for key, candidate in found.without.items()}
    best, runner_up = one(found.best), one(found.runner_up)
    return {"best": best, "runner_up": runner_up, "without": without, "tried": found.tried}


def sizes(needs: Needs) -> str:
    """Return what a plan takes in a few words."""
    if needs.kind == "cpu":
        return f"{needs.host_total / GIB:.1f} GiB of memory"
    return f"{needs.reserved / GIB:.1f} GiB of the device, {needs.host_total / GIB:.1f} of the host"


def _time(candidate: Candidate) -> str:
    if candidate.seconds is None:
        return ""
    tokens = candidate.planned.needs.tokens
    return f", {tokens / candidate.seconds:,.0f} tokens/s at best"


def draw(plans: dict[str, Needs], path: Path, *, budget: Budget, title: str) -> None:
    """Write a picture: a bar a plan, its categories stacked, against the line of the budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.9 + 0.55 * len(plans)), layout="constrained")
    panel = figure.subplots()
    left = [0.0] * len(plans)
    names = list(_COLORS)
    for name in names:
        parts = [_part(needs, name) / GIB for needs in plans.values()]
        if any(parts):
            label = _NAMES.get(name, name)
            panel.barh(list(plans), parts, left=left, color=_COLORS[name], label=label, height=0.6)
        left = [a + b for a, b in zip(left, parts, strict=True)]
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
