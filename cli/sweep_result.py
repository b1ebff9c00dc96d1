"""What a run of a sweep came to, read from its metrics.jsonl, and whether it diverges."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DONE, DIVERGED, FAILED, STOPPED = "done", "diverged", "failed", "stopped"
PATIENCE = 5  # logged steps in a row: a single one may be a hard batch
_LAST_PART = 0.1  # of the logged steps: their mean is the final training loss

Rows = Sequence[dict[str, Any]]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics.jsonl; none where there is no such file yet."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@dataclass(frozen=True)
class Rule:
    """When a run is worth stopping: its loss is not finite, or far above the one it began with.

    `max_loss` None is twice the first validation loss (or, without one, the first loss), and at
    least 1 more. `may_skip`: the run itself skips steps that are not finite, single ones are no
    reason.
    """

    max_loss: float | None = None
    may_skip: bool = False

    def __str__(self) -> str:
        bound = "twice its first one, by 1 or more" if self.max_loss is None else self.max_loss
        return (
            f"a run has diverged, and is ended, where its loss is not finite, or above {bound}, in "
            f"a validation or in {PATIENCE} logged steps in a row"
        )

    def divergence(self, rows: Rows) -> str | None:
        """Return in a sentence where and why a run diverged, or None."""
        bound = self.max_loss if self.max_loss is not None else _bound(rows)
        in_a_row = 0
        for row in rows:
            step = row.get("step")
            if "val_loss" in row:
                if row["val_loss"] is None:
                    return f"step {step}: the validation loss is not finite"
                if bound is not None and row["val_loss"] > bound:
                    return f"step {step}: the validation loss is above {bound:.4g}"
            if "loss" not in row:
                continue
            # the log writes a number that is not finite as null
            wrong = [k for k in ("loss", "grad_norm") if row.get(k, 0) is None]
            if wrong and not self.may_skip:
                return f"step {step}: {wrong[0]} is not finite"
            is_high = bool(wrong) or (bound is not None and row["loss"] > bound)
            in_a_row = in_a_row + 1 if is_high else 0
            if in_a_row == PATIENCE:
                what = "not finite" if wrong else f"above {bound:.4g}"
                return f"step {step}: the loss was {what} in {PATIENCE} logged steps in a row"
        return None


def _bound(rows: Rows) -> float | None:
    for key in ("val_loss", "loss"):
        first = next((row[key] for row in rows if row.get(key) is not None), None)
        if first is not None:
            return max(2 * first, first + 1)
    return None


def measure(rows: Rows) -> dict[str, float | int | None]:
    """Return the numbers of a run's row in the table.

    `val_loss`: the last one, `best_val_loss`: the lowest; `loss`: the mean of the last tenth of the
    logged steps; `seconds`: of training steps, without start, validation and saves;
    `peak_memory_gib`: of the device, on CPU of the process. None where nothing was logged.
    """
    steps = [row for row in rows if "loss" in row]
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    validated = [row["val_loss"] for row in rows if "val_loss" in row]
    finite = [loss for loss in validated if loss is not None]
    last = losses[-max(1, round(len(losses) * _LAST_PART)) :]
    before = [0, *(row["step"] for row in steps)]
    seconds = [
        row["seconds_per_step"] * (row["step"] - earlier)
        for row, earlier in zip(steps, before, strict=False)
        if "seconds_per_step" in row
    ]
    return {
        "val_loss": validated[-1] if validated else None,
        "best_val_loss": min(finite, default=None),
        "loss": sum(last) / len(last) if last else None,
        "steps": max((row["step"] for row in steps), default=0),
        "seconds": round(sum(seconds), 1) if seconds else None,
        "peak_memory_gib": max((row.get("peak_memory_gib", 0) for row in rows), default=0) or None,
    }
