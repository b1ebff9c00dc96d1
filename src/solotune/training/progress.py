"""Where a run stands, and when it does what."""

import math
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from solotune.data import Loader
from solotune.errors import ConfigError, TrainingError

_CHECKED = 2**24  # numbers looked at once: what is asked of each is a byte


@dataclass
class Progress:
    """Position of a run; all of it is saved and restored.

    `step` counts optimizer steps from 1 over all epochs and is 0 before the first;
    `batch` counts the micro-batches taken of the current epoch.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    num_tokens: int = 0  # trained on so far, filler excluded
    best_val_loss: float | None = None  # of the saved steps
    lowest_val_loss: float | None = None  # of all validations
    stale_validations: int = 0  # in a row, since the lowest
    data: str = ""  # fingerprint of the samples and of what cuts them into batches

    def check_data(self, data: str) -> None:
        """Raise ConfigError where the batches to come are not those of the saved run."""
        if self.data != data:
            raise ConfigError(
                "resume_from_checkpoint: the batches would not be those of the saved run (dataset, "
                f"tokenizer or a key of the loader: {self.data}; now {data}): resume with the "
                "same, or start a new run with checkpoint_dir set to the saved folder"
            )

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on in the middle of it."""
        if epoch != self.epoch:
            self.epoch, self.batch = epoch, 0

    def advance(self, group: list[Any]) -> None:
        """Count the step that has trained on `group`'s micro-batches."""
        self.step += 1
        self.batch += len(group)
        self.num_tokens += sum(batch.num_tokens for batch in group)

    def improves(self, val_loss: float) -> bool:
        """Record a validation loss; return whether it is the best so far, which NaN never is."""
        best = math.inf if self.best_val_loss is None else self.best_val_loss
        better = val_loss < best
        if better:
            self.best_val_loss = val_loss
        return better

    def count_validation(self, val_loss: float) -> None:
        """Count the validations since the lowest loss; NaN is never lower."""
        lowest = math.inf if self.lowest_val_loss is None else self.lowest_val_loss
        if val_loss < lowest:
            self.lowest_val_loss, self.stale_validations = val_loss, 0
        else:
            self.stale_validations += 1

    def is_over(self, patience: int | None) -> bool:
        """Whether `patience` validations in a row were not better; None waits for ever."""
        return patience is not None and self.stale_validations >= patience

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def step_lines(
    loader: Loader, accumulation: int, epochs: int, steps_per_epoch: int, done: int
) -> list[str]:
    """Return the facts to print about the run's steps; `done` counts those of an earlier part."""
    all_steps, batches = math.ceil(len(loader) / accumulation), min(accumulation, len(loader))
    return [
        f"a step: {loader.num_tokens // all_steps:,} tokens, {loader.num_targets // all_steps:,} "
        f"of them targets, in {batches} micro-batches of {loader.batch_size}",
        f"the run: {epochs} epochs of {steps_per_epoch} steps"
        + (f", {done} of them done" if done else ""),
    ]


def is_due(step: int, every: int | None, *, epoch_ends: bool) -> bool:
    """Whether something happens after `step`: each `every` steps, or at epoch ends for None."""
    return epoch_ends if every is None else step % every == 0


def check_finite(step: int, loss: float, grad_norm: float | None, *, on_nonfinite: str) -> None:
    """Raise TrainingError, or print, where a step was skipped since its numbers are not finite."""
    wrong = [
        f"{name} is {value}"
        for name, value in (("loss", loss), ("gradient norm", grad_norm))
        if value is not None and not math.isfinite(value)
    ]
    if not wrong:
        return
    if on_nonfinite == "skip":
        tqdm.write(f"warning: step {step} skipped: {' and '.join(wrong)}")
        return
    raise TrainingError(
        f"step {step}: {' and '.join(wrong)}; no weight was changed by it, and saved steps are "
        "intact: lower optimizer.lr, look at the data, or set on_nonfinite=skip"
    )


def check_weights(step: int, model: nn.Module) -> None:
    """Raise TrainingError where a weight is not finite: what was saved before stays the newest.

    A gradient that was not finite shows in the weights where they step inside backward.
    """
    finite = defaultdict(list)  # by device: streamed weights are in host memory
    for parameter in model.parameters():
        for piece in parameter.detach().view(-1).split(_CHECKED):
            finite[parameter.device].append(piece.isfinite().all())
    if not all(bool(torch.stack(checks).all()) for checks in finite.values()):
        names = [name for name, p in model.named_parameters() if not p.isfinite().all()]
        raise TrainingError(
            f"step {step}: {names[0]} holds numbers that are not finite, so nothing was saved: "
            "go on from an earlier step folder with a lower optimizer.lr, or look at the data"
        )


class StopFlag:
    """Set by Ctrl-C or SIGTERM, looked at between steps; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None

    @property
    def exit_code(self) -> int:
        """What a shell reports of a command ended by a signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + signal.Signals[self.signal_name] if self.signal_name else 0

    def _set(self, number: int, _frame: Any) -> None:
        if self:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        text = f"\n{self.signal_name}: saving after this step; once more stops without saving\n"
        os.write(2, text.encode())  # print may be what was interrupted, and cannot be entered twice


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Turn SIGINT and SIGTERM into a flag while the block runs."""
    flag = StopFlag()
    previous = {number: signal.signal(number, flag._set) for number in _SIGNALS}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
