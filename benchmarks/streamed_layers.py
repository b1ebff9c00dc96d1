"""What streaming layers from the host takes off the device, and what it costs.

    python benchmarks/streamed_layers.py --out docs/resident_layers.md

Full steps in bf16 with 8-bit state on the host, in the layer-major schedule, of SmolLM2-135M and a
1B model with random weights, on a card an 8B model too: with all blocks resident, with half of
them and with none. Peaks are live bytes, on a card beside the allocator's own; on CPU, where device
and host are the same memory, times say what the copies cost that nothing hides.
"""

import argparse
import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from figures import GIB, conditions, cpu_name, table, write_figures
from ladder import WORK, Work, peaks_on_card, timed
from random_model import RandomTensors, on_meta

from solotune.losses import LinearCrossEntropy
from solotune.memory import HostMemory, StateHome, Stepper, StreamedLayers, layer_major_step
from solotune.memory.tracker import MemoryTracker
from solotune.optim import decay_groups
from solotune.training import pick_device

MICRO_BATCHES = 4


@dataclass(frozen=True)
class Figures:
    """What a number of resident blocks has shown; bytes."""

    weights: int  # on the device
    device: int  # the peak of all there
    host: int
    moved: int  # weights there and back, a step
    seconds: float | None  # a step
    allocated: int | None  # the allocator's peak, on a card


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", default="auto", help="cuda or cpu; auto: what is there")
    add("--models", nargs="+", choices=WORK["cuda"], help="only these; all that fit the device")
    add("--steps", type=int, default=3, help="timed steps; 0: memory alone")
    add("--out", type=Path, help="Markdown page whose figures are replaced")
    options = parser.parse_args()
    device = pick_device(options.device)
    random = RandomTensors(device)
    where = cpu_name() + f" ({torch.get_num_threads()} threads)"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    parts = [conditions(where, "torch", "bitsandbytes")]
    for name in options.models or WORK[device.type]:
        work = WORK[device.type][name]
        layers = len(on_meta(work.build).blocks)
        rows = []
        for resident in (None, layers // 2, 0):
            figures = measure(work, random, resident=resident, num_steps=options.steps)
            rows.append(row("all" if resident is None else f"{resident} of {layers}", figures))
            print(name, rows[-1], flush=True)
            gc.collect()
        parts += [
            f"**{name}**, {MICRO_BATCHES} micro-batches of {work.batch_size} rows of "
            f"{work.max_seq_len} tokens a step",
            table([name for name, _ in rows[0]], [[cell for _, cell in row] for row in rows]),
        ]
    text = "\n\n".join(parts)
    print(f"\n{text}")
    if options.out:
        write_figures(options.out, text, script="streamed_layers.py")


def row(resident: str, f: Figures) -> list[tuple[str, str]]:
    """Return the cells of a row, each with the name of its column."""
    sizes = {
        "weights on device": f.weights,
        "peak on device": f.device,
        "peak on host": f.host,
        "weights moved a step": f.moved,
        "allocated": f.allocated,
    }
    cells = [(f"{name}, GiB", f"{n / GIB:.2f}") for name, n in sizes.items() if n is not None]
    times = [] if f.seconds is None else [("seconds a step", f"{f.seconds:.2f}")]
    return [("resident blocks", resident), *cells, *times]


def measure(work: Work, random: RandomTensors, *, resident: int | None, num_steps: int) -> Figures:
    """Train with so many blocks on the device."""
    from bitsandbytes.optim.adamw import AdamW8bit

    model = on_meta(work.build)
    layers = StreamedLayers(model, resident=resident)
    random.fill(model, on_host=layers)
    device = model.device
    host = HostMemory(device, weights=layers)
    optimizer = AdamW8bit(decay_groups(model), lr=1e-5)  # pyright: ignore[reportPrivateImportUsage]
    stepper = Stepper(optimizer, StateHome(optimizer, host=host, folder=None))
    loss_fn = LinearCrossEntropy()
    loader = work.loader(len(model.output_weight), packed=True)
    batches = [batch.to(device) for batch in loader.epoch(0)]
    group = [batches[number % len(batches)] for number in range(MICRO_BATCHES)]
    num_targets = sum(batch.num_targets for batch in group)

    def step() -> None:
        layer_major_step(model, loss_fn, stepper, group, num_targets, clip=None, host=host)

    step()  # makes the state
    with peaks_on_card(device) as peaks:
        seconds = timed(lambda: [step() for _ in range(num_steps or 1)], device)
    with MemoryTracker(model, loss_fn=loss_fn, stepper=stepper, host=host) as tracker:
        step()
    timeline = tracker.timeline()
    sizes = [sum(p.nbytes for p in b.parameters() if p in layers) for b in model.blocks]
    streamed = [size for size in sizes if size]
    host.settle()
    stepper.close()
    return Figures(
        weights=int(timeline.bytes_E["device", "weights"].max()),
        device=timeline.peak().num_bytes,
        host=timeline.peak("host").num_bytes,
        # In and out, and in for the backward but for the two that are there at the turn.
        moved=2 * sum(streamed) + sum(streamed[:-2]),
        seconds=seconds / num_steps if num_steps else None,
        allocated=peaks.get("allocated"),
    )


if __name__ == "__main__":
    main()
