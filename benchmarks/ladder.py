"""What each memory feature takes off the peak, one on top of the other.

    python benchmarks/ladder.py --out docs/benchmarks/ladder.md

Trains SmolLM2-135M and a 1B model, with random weights, on a card an 8B model too. Each rung of the
ladder adds a feature. It makes one step for the optimizer's state, is timed over all batches, and
then followed for one step on the largest batch: live bytes by category beside the allocator's own
peak.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from figures import conditions, cpu_name, table, write_figures
from random_model import RandomTensors
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from solotune.data import Batch, Loader, make_loader
from solotune.data.samples import Batching, Report, SampleWriter
from solotune.losses import LinearCrossEntropy
from solotune.memory import (
    HostMemory,
    Stepper,
    checkpoint_blocks,
    offload_activations,
    register_steps,
    step_in_backward,
)
from solotune.memory.timeline import CATEGORIES
from solotune.memory.tracker import MemoryTracker
from solotune.models import Decoder
from solotune.models.llama import llama3_1_8b, llama3_2_1b, smollm2_135m
from solotune.optim import decay_groups
from solotune.training import pick_device

MIB = 2**20

# What each rung adds, with its key.
RUNGS = {
    "baseline": "",
    "packed rows": "`dataset.packed`",
    "linear cross-entropy": "`loss`",
    "checkpointing": "`enable_activation_checkpointing`",
    "optimizer in backward": "`optimizer_in_bwd`",
    "offloading": "`enable_activation_offloading`",
    "8-bit state": "`optimizer`",
}
# Samples of each pack, in sixteenths of its length: together they fill it.
SHARES = ((16,), (9, 7), (11, 5), (3, 4, 9), (2, 6, 8), (1, 2, 13))
# Dense bf16 FLOP/s by what a card's name holds.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
COLORS = ("#31688e", "#6ba5c9", "#e08214", "#5aae61", "#b2182b", "#a0a0a0")  # by category


@dataclass(frozen=True)
class Work:
    """A model, and the batches that it is trained on."""

    build: Callable[[], Decoder]
    batch_size: int  # rows
    max_seq_len: int  # tokens of a row
    num_batches: int  # where rows are packed

    def loader(self, vocab: int, *, packed: bool) -> Loader:
        """Return a loader of random samples, the same packed or not; a quarter is no target."""
        random, samples = np.random.default_rng(0), SampleWriter()
        for pack in range(self.batch_size * self.num_batches):
            for share in SHARES[pack % len(SHARES)]:
                tokens = random.integers(vocab, size=self.max_seq_len * share // 16)
                is_answer = np.arange(len(tokens)) >= len(tokens) // 4
                samples.add(tokens.tolist(), is_answer.astype(np.uint8), pack)
        return make_loader(
            samples.finish(report=Report("random", None), batching=Batching(packed=packed)),
            batch_size=self.batch_size,
            max_seq_len=self.max_seq_len,
            seed=0,
            shuffle=False,
        )


WORK = {
    "cpu": {
        "SmolLM2-135M": Work(smollm2_135m, batch_size=2, max_seq_len=512, num_batches=3),
        "1B": Work(llama3_2_1b, batch_size=2, max_seq_len=128, num_batches=1),
    },
    "cuda": {
        "SmolLM2-135M": Work(smollm2_135m, batch_size=8, max_seq_len=2048, num_batches=12),
        "1B": Work(llama3_2_1b, batch_size=4, max_seq_len=2048, num_batches=6),
        "8B": Work(llama3_1_8b, batch_size=2, max_seq_len=2048, num_batches=3),
    },
}


@dataclass(frozen=True)
class Figures:
    """What one rung has shown; bytes, at the moment of the highest peak on the device."""

    by_category: dict[str, int]
    host: int  # at a moment of its own
    allocated: int  # the allocator's own peak; on CPU device and host together
    reserved: int | None  # on a card
    tokens_per_second: float
    flops_per_second: float  # without what is computed twice

    @property
    def device(self) -> int:
        return sum(self.by_category.values())


class PlainCrossEntropy(nn.Module):
    """Cross-entropy over the logits of all positions at once, as models with a `labels` do it."""

    def __init__(self) -> None:
        super().__init__()
        self.on_gradient: Callable[[Tensor], None] | None = None  # called with that of logits

    def forward(
        self, hidden_BSD: Tensor, weight_VD: Tensor, batch: Batch, num_targets: int
    ) -> Tensor:
        logits_BSV = F.linear(hidden_BSD, weight_VD)
        fp32_BSV = logits_BSV.float()
        if self.on_gradient is not None:
            logits_BSV.register_hook(self.on_gradient)
            fp32_BSV.register_hook(self.on_gradient)
        losses_T = F.cross_entropy(
            fp32_BSV.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=-100, reduction="sum"
        )
        return losses_T / num_targets


def main() -> None:
    options = parse_arguments()
    device = pick_device(options.device)
    work = {name: WORK[device.type][name] for name in options.models or WORK[device.type]}
    text = run(work, device, picture=options.out and options.out.with_suffix(".png"))
    print(f"\n{text}")
    if options.out:
        write_figures(options.out, text, script="ladder.py")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", default="auto", help="cuda or cpu; auto: what is there")
    add("--models", nargs="+", choices=WORK["cuda"], help="only these; all that fit the device")
    add("--out", type=Path, help="Markdown page whose figures are replaced; a picture beside it")
    return parser.parse_args()


def run(work: dict[str, Work], device: torch.device, *, picture: Path | None = None) -> str:
    """Climb the ladder with each model; return the Markdown, and draw `picture`."""
    random = RandomTensors(device)
    ladders = {name: climb(name, one, random, device) for name, one in work.items()}
    where = cpu_name() + f" ({torch.get_num_threads()} threads)"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    parts = [conditions(where, "torch", "bitsandbytes")]
    for name, ladder in ladders.items():
        one = work[name]
        parts += [
            f"**{name}**, bf16, {one.batch_size} rows of up to {one.max_seq_len} tokens a step",
            ladder_table(ladder, device),
        ]
    if picture:
        draw(ladders, picture)
        parts.append(f"![Peak by category, rung by rung]({picture.name})")
    return "\n\n".join(parts)


def climb(
    name: str, work: Work, random: RandomTensors, device: torch.device
) -> dict[str, Figures | str]:
    """Return the figures of each rung, or why it was skipped."""
    ladder: dict[str, Figures | str] = {}
    for number, rung in enumerate(RUNGS, start=1):
        on = frozenset(list(RUNGS)[:number])
        if rung == "8-bit state" and find_spec("bitsandbytes") is None:
            ladder[rung] = "skipped: bitsandbytes is not installed"
        else:
            ladder[rung] = measure(work, on, random, device)
        gc.collect()  # hooks and optimizer hold each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name:<14} {rung:<24} {summary(ladder[rung])}", flush=True)
    return ladder


def measure(work: Work, on: frozenset[str], random: RandomTensors, device: torch.device) -> Figures:
    """Train with the features that are `on`."""
    model = random.model(work.build)
    loss_fn = LinearCrossEntropy() if "linear cross-entropy" in on else PlainCrossEntropy()
    if "checkpointing" in on:
        checkpoint_blocks(model)
    groups = decay_groups(model)
    if "8-bit state" in on:
        from bitsandbytes.optim.adamw import AdamW8bit

        stepper = Stepper(AdamW8bit(groups, lr=1e-5))  # pyright: ignore[reportPrivateImportUsage]
    else:
        stepper = Stepper(torch.optim.AdamW(groups, lr=1e-5, fused=True))
    if "optimizer in backward" in on:
        register_steps(model, stepper)
    host = HostMemory(device)
    loader = work.loader(len(model.output_weight), packed="packed rows" in on)
    batches = [batch.to(device) for batch in loader.epoch(0)]

    def step(batch: Batch) -> None:
        train_step(model, loss_fn, stepper, batch, host, on)

    step(batches[0])  # the largest; makes the state
    with peaks_on_card(device) as peaks:
        seconds = timed(lambda: [step(batch) for batch in batches], device)

    tracker = MemoryTracker(model, loss_fn=loss_fn, stepper=stepper, host=host)
    if isinstance(loss_fn, PlainCrossEntropy):
        loss_fn.on_gradient = lambda gradient: _mark(tracker, gradient, "logits")
    with allocator_events(device) as events, tracker:
        step(batches[0])
    timeline = tracker.timeline()
    if not peaks:  # the allocator's events count from the start of the step
        at_start = int(timeline.total("device", "host")[0])
        peaks["allocated"] = at_start + max(accumulate(events, initial=0))
    tokens_per_second = loader.num_tokens / seconds
    multiplied = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    if not model.tied:
        multiplied -= model.embed_tokens.weight.numel()  # looked up only
    return Figures(
        by_category=timeline.peak().by_category,
        host=timeline.peak("host").num_bytes,
        allocated=peaks["allocated"],
        reserved=peaks.get("reserved"),
        tokens_per_second=tokens_per_second,
        flops_per_second=tokens_per_second * 6 * multiplied,
    )


def train_step(
    model: Decoder,
    loss_fn: nn.Module,
    stepper: Stepper,
    batch: Batch,
    host: HostMemory,
    on: frozenset[str],
) -> None:
    """One optimizer step on one micro-batch, as the recipe makes it without clipping."""
    x_BSD = model.embed(batch.tokens_BS).requires_grad_()
    context = model.context(batch.positions_BS, batch.segments_BM)
    around_block = nullcontext
    if "offloading" in on:
        keep = (*model.parameters(), *context.tensors(), x_BSD)
        around_block = offload_activations(host, keep=keep)
    hidden_BSD = model.hidden_states(x_BSD, context, around_block=around_block)
    loss = loss_fn(hidden_BSD, model.output_weight, batch, batch.num_targets)
    if "optimizer in backward" in on:
        step_in_backward(model, stepper, batch, x_BSD, loss, host=host)
        return
    loss.backward()
    model.add_embedding_gradient([(batch.tokens_BS, x_BSD.grad)])
    host.read(loss)
    stepper.step(model.parameters())
    stepper.optimizer.zero_grad(set_to_none=True)


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that `work` takes on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


@contextmanager
def peaks_on_card(device: torch.device) -> Iterator[dict[str, int]]:
    """Yield what holds, after the end, the allocator's peaks in bytes; on CPU nothing."""
    peaks: dict[str, int] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield peaks
    if device.type == "cuda":
        peaks["allocated"] = torch.cuda.max_memory_allocated(device)
        peaks["reserved"] = torch.cuda.max_memory_reserved(device)


@contextmanager
def allocator_events(device: torch.device) -> Iterator[list[int]]:
    """Yield what holds, after the end, the bytes of each allocation and, below 0, each release."""
    events: list[int] = []
    if device.type == "cuda":  # has its own statistics
        yield events
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield events
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    found: list[Any] = list(profiler.profiler.kineto_results.events())
    found = [event for event in found if event.name() == "[memory]"]
    events += [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]


def _mark(tracker: MemoryTracker, tensor: Tensor, category: str) -> None:
    """Tell a tracker what a tensor is for: it cannot know the gradients of a foreign loss."""
    for life in tracker.see(tensor, is_new=False):
        life.category = category


# --- the report -----------------------------------------------------------------------------


def summary(figures: Figures | str) -> str:
    if isinstance(figures, str):
        return figures
    return (
        f"peak {figures.device / MIB:8,.0f} MiB, allocator {figures.allocated / MIB:8,.0f} MiB, "
        f"{figures.tokens_per_second:8,.0f} tokens/s"
    )


def ladder_table(ladder: dict[str, Figures | str], device: torch.device) -> str:
    """Return the rungs of one model as Markdown; MiB."""
    on_card = device.type == "cuda"
    header = ["+", "key", *CATEGORIES, "**device**", "host", "allocator"]
    header += [*(["reserved"] if on_card else []), "tokens/s", *(["MFU"] if on_card else [])]
    rows = []
    for rung, figures in ladder.items():
        if isinstance(figures, str):
            rows.append([rung, RUNGS[rung], figures, *[""] * (len(header) - 3)])
            continue
        parts = [figures.by_category[category] for category in CATEGORIES]
        cells = [f"{part / MIB:,.0f}" for part in parts]
        cells += [f"**{figures.device / MIB:,.0f}**", f"{figures.host / MIB:,.0f}"]
        cells += [f"{figures.allocated / MIB:,.0f}"]
        if figures.reserved is not None:
            cells.append(f"{figures.reserved / MIB:,.0f}")
        cells.append(f"{figures.tokens_per_second:,.0f}")
        if on_card:
            cells.append(mfu(figures, torch.cuda.get_device_name(device)))
        rows.append([rung, RUNGS[rung], *cells])
    return table(header, rows)


def mfu(figures: Figures, card: str) -> str:
    """Return the share of a card's bf16 peak that the training needs; attention is left out."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)
    return f"{figures.flops_per_second / peak:.0%}" if peak else ""


def draw(ladders: dict[str, dict[str, Figures | str]], path: Path) -> None:
    """Write a picture: a panel a model, a bar a rung, categories stacked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.6 + 2.9 * len(ladders)), layout="constrained")
    panels = figure.subplots(len(ladders), squeeze=False)[:, 0]
    for panel, (name, ladder) in zip(panels, ladders.items(), strict=True):
        measured = {rung: f for rung, f in ladder.items() if isinstance(f, Figures)}
        largest = max(figures.device for figures in measured.values()) / MIB
        left = np.zeros(len(measured))
        for category, color in zip(CATEGORIES, COLORS, strict=True):
            parts = np.array([f.by_category[category] / MIB for f in measured.values()])
            panel.barh(list(measured), parts, left=left, color=color, label=category)
            left += parts
        for row, figures in enumerate(measured.values()):
            text = f" {figures.device / MIB:,.0f} MiB, {figures.tokens_per_second:,.0f} tokens/s"
            panel.text(left[row], row, text, va="center", fontsize=9)
        panel.set(title=name, xlim=(0, 1.3 * largest), xlabel="MiB on the device at its peak")
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
