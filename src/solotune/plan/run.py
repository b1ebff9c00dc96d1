"""The plan that a run makes of itself: a prediction to compare with, and a refusal in time."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from solotune.data import Loader
from solotune.errors import ConfigError, UserError
from solotune.plan.budget import Budget, free_of_device, free_of_host
from solotune.plan.needs import GIB, PROCESS, Needs, Planned, needs_of
from solotune.plan.search import changed
from solotune.plan.simulate import Work


@dataclass(frozen=True)
class RunPlan:
    """What is expected of a run's memory."""

    needs: Needs
    plan: Callable[[Any], Planned]
    cfg: Any
    validate: Callable[[Any], None]

    def peak_with(self, change: Mapping[str, Any]) -> int | None:
        """Return the bytes of the peak with some keys changed; None where they are not valid.

        An optimizer is named by its path; it gets the learning rate of the run's.
        """
        values = dict(change)
        if "optimizer" in values:
            given = self.cfg.optimizer
            rate = {k: v for k, v in given.arguments.items() if k == "lr"}
            values["optimizer"] = dataclasses.replace(
                given, path=values["optimizer"], arguments=rate, written={}
            )
        cfg = changed(self.cfg, values)
        try:
            self.validate(cfg)
            return self.plan(cfg).needs.peak
        except ConfigError:
            return None

    @property
    def predicted_bytes(self) -> int:
        """What the run measures as its peak: on a card the allocator's, on CPU the process's."""
        if self.needs.kind != "cpu":
            return self.needs.peak
        mapped = self.needs.disk.get("optimizer state", 0)  # files that are stepped in place
        return self.needs.host_total + mapped

    def lines(self) -> list[str]:
        """Return the printed lines."""
        needs = self.needs
        parts = ", ".join(
            f"{name} {size / GIB:.2f}" for name, size in needs.device.items() if size >= GIB // 100
        )
        bound = "at most " if needs.is_upper_bound else ""
        found = f"plan: {bound}{self.predicted_bytes / GIB:.2f} GiB at the peak, in {needs.phase}"
        if needs.kind != "cpu":
            found += f", {needs.host_total / GIB:.2f} GiB of host memory"
        return [found + (f" ({parts})" if parts else "")]


def plan_run(
    recipe: Mapping[str, Any], cfg: Any, device: torch.device, loader: Loader, *, folder: Path
) -> RunPlan | None:
    """Return what a run is expected to need; None where `plan` is off or the recipe has no plan.

    `recipe` holds the functions of the recipe, by name. Raises UserError where the run cannot fit.
    """
    if not cfg.plan:
        return None
    try:
        work = largest_work(loader)

        def plan(other: Any) -> Planned:
            """Plan the run with other keys; a smaller batch holds as much fewer of its rows."""
            rows = max(1, work.rows * other.batch_size // cfg.batch_size)
            shape = work if rows == work.rows else Work(rows, work.tokens)
            module = SimpleNamespace(**recipe)
            kind = "cpu" if device.type == "cpu" else "cuda"
            return needs_of(module, other, kind=kind, folder=folder, work=shape)

        needs = plan(cfg).needs
    except UserError:
        raise
    except Exception as error:  # a copied recipe may do what no fake tensor can; it still runs
        reason = str(error).partition("\n")[0]
        print(f"plan: none of this recipe ({type(error).__name__}: {reason}); plan=False omits it")
        return None
    if faults := _budget(device).faults(needs):
        raise UserError(
            f"plan: the run does not fit {device}: {'; '.join(faults)}: `tune plan ... --vram auto "
            "--ram auto` looks for a configuration that does, plan=False runs it anyhow"
        )
    return RunPlan(needs, plan, cfg, recipe["validate"])


def largest_work(loader: Loader) -> Work:
    """Return the shape of a loader's first batch, which is the one that needs most memory.

    Of packed rows that is the one with the longest sample; that another has more targets is not
    known, so each position counts as one.
    """
    batch = next(iter(loader.epoch(0)))
    lengths = tuple(tuple(n for n in row if n) for row in batch.host_segments_BM.tolist())
    rows, tokens = batch.tokens_BS.shape
    is_packed = any(len(row) > 1 for row in lengths)
    return Work(rows, tokens, lengths, None if is_packed else batch.num_targets)


def _budget(device: torch.device) -> Budget:
    """Return what is free; this process's own part is there already."""
    host = free_of_host() + PROCESS["cpu"]
    if device.type == "cpu":
        return Budget(host=host)
    return Budget(device=free_of_device(device) if device.type == "cuda" else None, host=host)
