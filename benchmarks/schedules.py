"""What stepping inside backward costs in time: each schedule against its plain one.

    python benchmarks/schedules.py --out docs/benchmarks/schedules.md

Two trainers with the same random weights make the same steps, in turns, so that both see the same
machine. Where their memory lies makes one a few hundredths faster than its equal: so there are
several pairs, and each is made first in every other. The figure is the median over all rounds of
one's seconds by the other's.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import torch
from figures import conditions, cpu_name, table, write_figures
from gpu_check import Trainer, Way
from ladder import Work, timed
from random_model import RandomTensors

from solotune.models.llama import llama3_2_1b, smollm2_135m
from solotune.training import pick_device

WORK = {
    "cpu": ("SmolLM2-135M", Work(smollm2_135m, batch_size=1, max_seq_len=512, num_batches=4)),
    "cuda": ("1B", Work(llama3_2_1b, batch_size=4, max_seq_len=2048, num_batches=8)),
}
# What is compared, with the most that it may cost. All with full checkpointing.
PAIRS = {
    "optimizer in backward": (Way(), Way(in_backward=True), 1.03),
    "layer-major, 4 micro-batches": (Way(4), Way(4, in_backward=True), 1.05),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda or cpu; auto: what is there")
    parser.add_argument("--pairs", type=int, default=6, help="of trainers")
    parser.add_argument("--rounds", type=int, default=4, help="of each pair")
    parser.add_argument("--out", type=Path, help="Markdown page whose figures are replaced")
    options = parser.parse_args()

    device = pick_device(options.device)
    name, work = WORK[device.type]
    random = RandomTensors(device)
    rows = []
    for schedule, (plain, other, most) in PAIRS.items():
        seconds = []
        for pair in range(options.pairs):
            seconds += compare(work, random, plain, other, options.rounds, swapped=pair % 2 == 1)
        ratios = sorted(b / a for a, b in seconds)
        row = [schedule, *(f"{median(side):.2f} s" for side in zip(*seconds, strict=True))]
        row += [f"**{median(ratios):.3f}**", f"{ratios[0]:.3f} to {ratios[-1]:.3f}", f"{most}"]
        rows.append(row)
        print(*row, sep="  ", flush=True)
    where = cpu_name() + f" ({torch.get_num_threads()} threads)"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    header = ["schedule", "plain step", "step", "ratio", "all rounds", "at most"]
    text = (
        f"{conditions(where, 'torch')}  \n{name}, bf16, {work.batch_size} x {work.max_seq_len} "
        f"tokens a micro-batch, {options.pairs} pairs of trainers, {options.rounds} rounds each."
        f"\n\n{table(header, rows)}"
    )
    print(f"\n{text}")
    if options.out:
        write_figures(options.out, text, script="schedules.py")


def compare(
    work: Work, random: RandomTensors, plain: Way, other: Way, rounds: int, *, swapped: bool
) -> list[tuple[float, float]]:
    """Return the seconds of both ways' steps by round; `swapped`: the other is made first."""
    made = [Trainer(work, random, way) for way in ((other, plain) if swapped else (plain, other))]
    trainers = made[::-1] if swapped else made
    device = trainers[0].model.device
    for trainer in trainers:
        trainer.step(0)  # makes the state
    seconds = []
    for number in range(1, rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        one = {k: timed(partial(trainers[k].step, number), device) for k in order}
        seconds.append((one[0], one[1]))
    return seconds


if __name__ == "__main__":
    main()
