"""The predicted peak of a step against the one that an allocator has measured.

    python benchmarks/plan_accuracy.py --out docs/benchmarks/plan_accuracy.md

Each case is planned, and then two optimizer steps are made by the same functions of the recipe on
made-up weights. On CPU the measured peak is that of the allocator's own events, from the first
weight on, with the files that torch maps (`optimizer_state=disk`); on a card
`torch.cuda.max_memory_allocated`, with what the allocator reserved beside it.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from figures import MIB, conditions, cpu_name, table, write_figures
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from solotune.cli.run import import_recipe  # pyright: ignore[reportMissingImports]
from solotune.config import find_recipe
from solotune.config.loading import load
from solotune.data import Batch
from solotune.data.batch import collate
from solotune.memory.workers import Worker
from solotune.models.llama import llama3_2_1b, smollm2_135m
from solotune.models.qwen2 import qwen2_5_0_5b
from solotune.plan.simulate import Work, simulate
from solotune.plan.training import Training, fill_parameters
from solotune.training import pick_device

FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
STEPS = 2  # the second begins with the optimizer's state
ADAMW = "optimizer=torch.optim.AdamW optimizer.lr=1e-5"
FUSED = f"{ADAMW} optimizer.fused=True"
IN_BACKWARD = "optimizer_in_bwd=True clip_grad_norm=None"
PLAIN = "enable_activation_checkpointing=False"
OFFLOADING = "enable_activation_offloading=True"


@dataclass(frozen=True)
class Shape:
    """A model, cut to some blocks, and its micro-batch."""

    build: Any
    layers: int
    rows: int
    tokens: int


SHAPES = {
    "SmolLM2-135M": Shape(smollm2_135m, 30, rows=2, tokens=128),
    "Llama-3.2-1B, 2 blocks": Shape(llama3_2_1b, 2, rows=1, tokens=192),
    "Qwen2.5-0.5B, 4 blocks": Shape(qwen2_5_0_5b, 4, rows=2, tokens=160),
}


@dataclass(frozen=True)
class Case:
    """A configuration of a model."""

    shape: str
    words: str
    recipe: str = FULL
    compiled: bool = False  # then the figure is an upper bound

    @property
    def title(self) -> str:
        return self.words.replace("enable_activation_", "").replace("optimizer_", "")


def cases() -> list[Case]:
    small, wide, biased = SHAPES
    kahan = "optimizer=solotune.optim.AdamWKahan optimizer.lr=1e-5"
    eight_bit = "optimizer=bitsandbytes.optim.AdamW8bit optimizer.lr=1e-5"
    in_backward = f"{FUSED} {IN_BACKWARD}"
    words = [
        f"{FUSED} {PLAIN}",
        f"{FUSED} gradient_accumulation_steps=4",
        f"{ADAMW} clip_grad_norm=None",
        f"{in_backward} {PLAIN}",
        in_backward,
        f"{in_backward} ac_mode=selective ac_option=2",
        f"{in_backward} ac_mode=selective ac_option=op",
        f"{in_backward} {OFFLOADING}",
        f"{in_backward} {OFFLOADING} {PLAIN}",
        f"{in_backward} {OFFLOADING} activation_offload_to=disk",
        f"{in_backward} optimizer_state=host",
        f"{in_backward} optimizer_state=disk loss.chunk_tokens=32",
        f"{in_backward} gradient_accumulation_steps=4",
        f"{in_backward} gradient_accumulation_steps=2 resident_layers=4",
        f"{FUSED} optimizer_in_bwd=True gradient_accumulation_steps=2",
        f"{FUSED} trainable=layers.2[0-9] {PLAIN}",
        f"{in_backward} dtype=fp32 {PLAIN}",
        f"{in_backward} dtype=fp32 autocast=True {PLAIN}",
        f"{kahan} {PLAIN}",
        f"{kahan} optimizer.residual=int8 optimizer.state_dtype=int8 {IN_BACKWARD}",
        f"{kahan} {IN_BACKWARD} optimizer_state=host gradient_accumulation_steps=3",
        f"{eight_bit} {PLAIN}",
        f"{eight_bit} {IN_BACKWARD} optimizer_state=host",
    ]
    found = [Case(small, each) for each in words]
    for shape in (wide, biased):
        found += [
            Case(shape, f"{FUSED} {PLAIN}"),
            Case(shape, f"{FUSED} gradient_accumulation_steps=2"),
            Case(shape, f"{kahan} {IN_BACKWARD} gradient_accumulation_steps=2"),
            Case(shape, f"{eight_bit} {IN_BACKWARD} {OFFLOADING}"),
        ]
    lora = f"{FUSED} adapter.rank=16 adapter.targets=all-linear"
    found += [
        Case(small, lora, recipe=LORA),
        Case(small, f"{lora} adapter.dropout=0.1", recipe=LORA),
        Case(small, f"{lora} quantize_base=nf4 {PLAIN}", recipe=LORA),
        Case(wide, f"{lora} adapter.dora=True quantize_base=nf4", recipe=LORA),
        Case(biased, f"{lora} {IN_BACKWARD} gradient_accumulation_steps=2", recipe=LORA),
        Case(biased, f"{in_backward} {PLAIN} compile=True", compiled=True),
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", default="auto", help="cuda or cpu; auto: what is there")
    add("--only", help="only cases whose title holds this text")
    add("--first", type=int, default=0, help="leave out so many cases")
    add("--out", type=Path, help="Markdown page whose figures are replaced")
    options = parser.parse_args()
    device = pick_device(options.device)
    rows = []
    for case in cases()[options.first :]:
        if options.only and options.only not in f"{case.shape} {case.title}":
            continue
        predicted, measured, seconds = run(case, device)
        error = predicted / measured["allocated"] - 1
        cells = [f"{predicted / MIB:,.1f}", *(f"{size / MIB:,.1f}" for size in measured.values())]
        label = "upper bound" if case.compiled else ""
        rows.append([case.shape, f"`{case.title}`", *cells, f"{100 * error:+.2f} %", label])
        print(f"{' '.join(rows[-1])}  planned in {seconds:.1f} s", flush=True)
        gc.collect()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    names = ["measured", "reserved"] if device.type == "cuda" else ["measured"]
    header = ["model", "keys", "predicted MiB", *(f"{name} MiB" for name in names), "error", ""]
    text = f"{conditions(where, 'torch', 'bitsandbytes')}\n\n{table(header, rows)}"
    if options.out:
        write_figures(options.out, text, script="plan_accuracy.py")


def run(case: Case, device: torch.device) -> tuple[int, dict[str, int], float]:
    """Return the predicted peak, the measured ones, and the seconds that the plan took."""
    recipe = import_recipe(find_recipe(case.recipe))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = SHAPES[case.shape]
        with torch.device("meta"):
            config = shape.build().config | {"num_hidden_layers": shape.layers}
        (folder / "config.json").write_text(json.dumps(config))
        words = [
            f"checkpoint_dir={folder}",
            "dataset=chats.jsonl",
            f"batch_size={shape.rows}",
            f"tokenizer.max_seq_len={shape.tokens}",
            *case.words.split(),
        ]
        cfg = load(find_recipe(case.recipe), None, words).instance(recipe.Config)
        recipe.validate(cfg)
        first = shape.tokens * 2 // 3
        lengths = ((first, shape.tokens - first),) * shape.rows
        work = Work(shape.rows, shape.tokens, lengths, shape.rows * (shape.tokens - 2))
        start = time.perf_counter()
        planned = simulate(recipe, cfg, kind=device.type, work=work, folder=folder)
        seconds = time.perf_counter() - start
        if device.type == "cuda":
            predicted = planned.most(lambda step: step.device.num_bytes)
        else:
            mapped = planned.peak(lambda step: step.disk).by_category["optimizer state"]
            predicted = planned.most(lambda step: step.together) + mapped
        with peaks(device) as measured:
            train(recipe, cfg, work, device, folder)
    return predicted, measured, seconds


def train(recipe: ModuleType, cfg: Any, work: Work, device: torch.device, folder: Path) -> None:
    """Step a model by the functions of the recipe; bytes do not depend on its numbers."""
    output_dir = folder / "run"
    output_dir.mkdir()

    def make(parameter: nn.Parameter) -> Tensor:
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        return tensor.fill_(1.0 if tensor.dim() == 1 else 0.01)

    training = Training(
        recipe,
        cfg,
        device=device,
        folder=folder,
        output_dir=output_dir,
        fill=lambda model: fill_parameters(model, make),
    )
    random, vocab = np.random.default_rng(0), len(training.model.output_weight)
    with closing(training.stepper):
        for _ in range(STEPS):
            count = range(cfg.gradient_accumulation_steps)
            training.step([batch(work, vocab, random) for _ in count])


def batch(work: Work, vocab: int, random: np.random.Generator) -> Batch:
    rows = [
        [(random.integers(vocab, size=n), np.ones(n, np.uint8)) for n in lengths]
        for lengths in work.segments
    ]
    most = max(map(len, work.segments))
    return collate(rows, row_length=work.tokens, max_segments=most, key=0)


@contextmanager
def peaks(device: torch.device) -> Iterator[dict[str, int]]:
    """Yield what holds the allocator's peaks in bytes after the end."""
    found: dict[str, int] = {}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found["allocated"] = torch.cuda.max_memory_allocated(device) - before
        found["reserved"] = torch.cuda.max_memory_reserved(device)
        return
    with workers_in_line(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        yield found
    assert prof.profiler is not None
    assert prof.profiler.kineto_results is not None
    events: list[Any] = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    found["allocated"] = max(accumulate((event.nbytes() for event in events), initial=0))


@contextmanager
def workers_in_line() -> Iterator[None]:
    """Let the main thread do what threads do: the profiler does not see what they allocate."""

    def submit(self: Worker, work: Any, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done

    before, Worker.submit = Worker.submit, submit
    try:
        yield
    finally:
        Worker.submit = before


if __name__ == "__main__":
    main()
