"""A recipe's own optimizer step, run on tensors that have no memory.

The recipe's setup functions and its `train_step` are called as its `main` calls them, with fake CPU
tensors that stand for those of a card (or of a CPU). Every block of the model runs. What is
shortened: an optimizer that goes from parameter to parameter steps each shape once, and of many
micro-batches three run, since a fourth adds what the third has added.

Shapes: B rows of a micro-batch, S tokens a row, M segments a row.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from solotune.collector import collector_off
from solotune.data import Batch
from solotune.device_kind import standing_for
from solotune.memory.stepping import Stepper
from solotune.memory.timeline import Peak
from solotune.memory.tracker import replaced, state_parts, tensors_in
from solotune.models import Decoder
from solotune.plan.repeats import Repeats
from solotune.plan.training import Training, fill_parameters
from solotune.plan.watch import Held, Step, StepWatch, Stretch
from solotune.training.precision import DTYPES

_MOST_SIMULATED = 3  # micro-batches of one step


@dataclass(frozen=True)
class Work:
    """A micro-batch: `rows` of `tokens`, the `lengths` of each row's segments, rows with a target.

    By default a row is one segment, which needs most memory, and each position has a target.
    """

    rows: int
    tokens: int
    lengths: tuple[tuple[int, ...], ...] = ()
    targets: int | None = None

    @property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        return self.lengths or ((self.tokens,),) * self.rows

    @property
    def num_targets(self) -> int:
        return self.rows * self.tokens if self.targets is None else self.targets

    @property
    def pairs(self) -> float:
        """How many (query, key) causal attention computes in one head."""
        return sum(length * (length + 1) / 2 for row in self.segments for length in row)

    def batch(self, fake: FakeTensorMode) -> Batch:
        """Return fake tensors of this shape; lengths are real: the code for a CPU reads them."""
        most = max(map(len, self.segments))
        lengths = [[*row, *[0] * (most - len(row))] for row in self.segments]
        segments_BM = torch.tensor(lengths, dtype=torch.int32)
        with fake:
            tokens_BS, labels_BS, positions_BS = (
                torch.empty(self.rows, self.tokens, dtype=torch.int64) for _ in range(3)
            )
            target_rows_T = torch.empty(self.num_targets, dtype=torch.int64)
        return Batch(
            tokens_BS=tokens_BS,
            labels_BS=labels_BS,
            positions_BS=positions_BS,
            segments_BM=segments_BM,
            target_rows_T=target_rows_T,
            host_segments_BM=segments_BM,
            num_tokens=sum(map(sum, self.segments)),
            num_targets=self.num_targets,
            key=0,  # with one, adapters drop
        )


@dataclass(frozen=True)
class Simulated:
    """What the steps of a run need, seen on some of them."""

    kind: str  # of the device
    work: Work
    micro_batches: int  # of a step of the run
    first: Step  # makes the optimizer's state
    later: tuple[Step, ...]  # with the run's micro-batches, or with two and with three of them
    blocks: int
    parameters: int
    trained: int  # of them
    weight_bytes: int
    trained_bytes: int
    state_bytes: int  # of the optimizer, wherever it lives
    is_paged: bool  # by bitsandbytes

    def at(self, value: Callable[[Step], float]) -> float:
        """Return a value of a later step of the run; beyond three micro-batches it is a line."""
        last = self.later[-1]
        beyond = self.micro_batches - last.micro_batches
        slope = value(last) - value(self.later[-2]) if beyond else 0
        return value(last) + beyond * slope

    def most(self, value: Callable[[Held], int]) -> int:
        """Return the most of a later step's stretches, or of the first step's."""
        first = max(map(value, self.first.held.values()))
        return max(first, *(int(self._along(s, value)) for s in self.later[-1].held))

    def peak(self, place: Callable[[Held], Peak]) -> Peak:
        """Return the peak of a place: that of the first step, or of later ones."""
        peaks = list(map(place, self.first.held.values()))
        for stretch, held in self.later[-1].held.items():
            last = place(held)
            parts = {
                name: max(0, int(self._along(stretch, lambda h, n=name: place(h).by_category[n])))
                for name in last.by_category
            }
            peaks.append(Peak(sum(parts.values()), last.phase, parts, parts))
        return max(peaks, key=lambda peak: peak.num_bytes)

    @property
    def reserved(self) -> int:
        """What the allocator takes: beyond three micro-batches the peak with holes as before."""
        last, peak = self.later[-1], self.peak(lambda held: held.device).num_bytes
        holes = last.reserved / last.allocated if self.micro_batches > last.micro_batches else 0
        return max(self.first.reserved, last.reserved, int(peak * holes), peak)

    def _along(self, stretch: Stretch, value: Callable[[Held], int]) -> float:
        """Return a value of a stretch in a step of the run."""
        if any(stretch not in step.held for step in self.later):
            return value(self.later[-1].held[stretch])
        return self.at(lambda step: value(step.held[stretch]))


def simulate(recipe: Any, cfg: Any, *, kind: str, work: Work, folder: Path) -> Simulated:
    """Return what a recipe's steps need under a config, on a device of `kind`: cuda or cpu.

    `folder` is the model folder, of which config.json alone is read.
    """
    fake, count = FakeTensorMode(allow_non_fake_inputs=True), cfg.gradient_accumulation_steps

    def fill(model: Decoder) -> None:
        with fake:
            fill_parameters(model, lambda p: torch.empty(p.shape, dtype=p.dtype))

    fork = torch.random.fork_rng(devices=[])  # a run that was planned draws the same numbers
    folders = tempfile.TemporaryDirectory()
    quiet = warnings.catch_warnings(action="ignore", category=UserWarning)  # of a CPU's optimizers
    with fork, collector_off(), quiet, standing_for(kind), folders as output_dir:
        training = Training(
            recipe,
            cfg,
            device=torch.device("cpu"),
            folder=folder,
            output_dir=Path(output_dir),
            fill=fill,
            around_setup=lambda: fake,
        )
        model, stepper = training.model, training.stepper
        _as_on(kind, stepper)
        _warm_up(cfg, model)
        watched = {"loss_fn": training.loss_fn, "stepper": stepper, "host": training.host}
        watch = StepWatch(model, **watched, kind=kind, pairs=work.pairs, fake=fake)
        repeats = Repeats(watch, stepper.optimizer)
        sizes = [1, *range(min(count, 2), min(count, _MOST_SIMULATED) + 1)]
        with closing(stepper), fake, watch, replaced(stepper, "_step_only", repeats.step):
            for size in sizes:
                with _disable_current_modes():  # what the CPU's code reads is real
                    group = [work.batch(fake) for _ in range(size)]
                _show(watch, group)
                with watch.step(size):
                    training.step(group)
                del group
        steps = watch.steps()
        state = [part for p in stepper.optimizer.state for part, _ in state_parts(stepper, p)]
        return Simulated(
            kind=kind,
            work=work,
            micro_batches=count,
            first=steps[0],
            later=tuple(steps[1:]),
            blocks=len(model.blocks),
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            weight_bytes=sum(p.nbytes for p in model.parameters()),
            trained_bytes=sum(p.nbytes for p in model.parameters() if p.requires_grad),
            state_bytes=sum(part.nbytes for part in state),
            is_paged=getattr(stepper.optimizer, "is_paged", False),
        )


def _show(watch: StepWatch, group: list[Batch]) -> None:
    """Let micro-batches be alive from now on."""
    for batch in group:
        for tensor in tensors_in(vars(batch).values()):
            watch.see(tensor, is_new=True)


def _as_on(kind: str, stepper: Stepper) -> None:
    """Choose what torch's optimizers choose by the device of real tensors."""
    module = sys.modules[type(stepper.optimizer).__module__]
    chooses = hasattr(module, "_default_to_fused_or_foreach")  # torch's Adafactor and Muon do not
    for group in stepper.optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = chooses and kind == "cuda"


def _warm_up(cfg: Any, model: Decoder) -> None:
    """Step a small matrix that is real: tables that an optimizer makes once must hold numbers."""
    trained = (p.dtype for p in model.parameters() if p.requires_grad)
    dtype = min(trained, key=lambda dtype: dtype.itemsize, default=DTYPES[cfg.dtype])
    weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    weight.grad = torch.zeros_like(weight)
    with torch.compiler.set_stance("force_eager"):
        Stepper(cfg.optimizer.build([weight])).step([weight])
