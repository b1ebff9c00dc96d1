"""Bytes a parameter and the time of a step, optimizer by optimizer.

    python benchmarks/optimizer_bytes.py --out docs/benchmarks/optimizer_bytes.md

Steps matrices of one block of a 1B model. Bytes are those of the tensors that live between two
steps; times are medians over rounds in which every optimizer steps once, by torch's fused AdamW on
bf16 weights. The first step, which compiles, does not count.
"""

import argparse
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from figures import conditions, cpu_name, table, write_figures
from torch import Tensor, nn

from solotune.memory import Stepper
from solotune.memory.tracker import state_parts
from solotune.optim import AdamWKahan, LionKahan
from solotune.training import pick_device

SHAPES = ((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192))  # 38.8 M numbers
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Kind:
    """How an optimizer is made, the dtype of its weights, and its label."""

    make: Any
    label: str
    dtype: torch.dtype = BF16


class Trained:
    """Matrices, their gradients and their optimizer."""

    def __init__(self, kind: Kind, device: torch.device) -> None:
        self.parameters = [
            nn.Parameter(0.02 * torch.randn(shape, device=device).to(kind.dtype))
            for shape in SHAPES
        ]
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.stepper = Stepper(kind.make(self.parameters, lr=1e-5))
        self.device = device
        self.seconds: list[float] = []
        self.step()

    def step(self) -> None:
        start = time.perf_counter()
        self.stepper.step(self.parameters)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)

    def bytes_each(self) -> tuple[float, float]:
        """Return the bytes a parameter of weights and of state."""
        numbers = sum(p.numel() for p in self.parameters)
        state: list[Tensor] = [
            part for p in self.parameters for part, _ in state_parts(self.stepper, p)
        ]
        weights = sum(p.nbytes for p in self.parameters)
        return weights / numbers, sum(part.nbytes for part in state) / numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda or cpu; auto: what is there")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="Markdown page whose figures are replaced")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = pick_device(options.device)
    trained = {name: Trained(kind, device) for name, kind in kinds().items()}
    for _ in range(options.rounds):
        for one in trained.values():
            one.step()
    fused = median(trained["torch AdamW, fused"].seconds[1:])
    rows = []
    for name, one in trained.items():
        weights, state = one.bytes_each()
        kind = kinds()[name]
        cells = [f"{number:.1f}".removesuffix(".0") for number in (weights, state)]
        sums = (weights + state + weights, weights + state)  # a gradient is as large as its weight
        cells += [f"**{number:.1f}**".replace(".0**", "**") for number in sums]
        rows.append([name, *cells, f"{median(one.seconds[1:]) / fused:.2f}", kind.label])
    header = ["", "weights", "state", "with gradients", "stepping in backward", "time", "label"]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    text = f"{conditions(where, 'torch', 'torchao', 'bitsandbytes')}\n\n{table(header, rows)}"
    print(text)
    if options.out:
        write_figures(options.out, text, script="optimizer_bytes.py")


def kinds() -> dict[str, Kind]:
    """Return what is measured, by name."""
    import bitsandbytes.optim as bnb
    import torchao.optim as ao

    fused = partial(torch.optim.AdamW, fused=True)
    lost, exact = "loses small updates", "reordered"
    found = {
        "torch AdamW, fused": Kind(fused, lost),
        "torch AdamW, fused, fp32 weights": Kind(fused, exact, FP32),
        "torch Adafactor": Kind(torch.optim.Adafactor, lost),
    }
    for residual, state in (
        ("int16", "fp32"),
        ("int16", "bf16"),
        ("int8", "bf16"),
        ("int8", "int8"),
        ("none", "bf16"),
        ("none", "int8"),
    ):
        label = exact if (residual, state) == ("int16", "fp32") else "approximate"
        label = "unbiased" if residual == "none" else label
        for name, ours in (("AdamWKahan", AdamWKahan), ("LionKahan", LionKahan)):
            make = partial(ours, residual=residual, state_dtype=state)
            found[f"{name} residual {residual}, state {state}"] = Kind(make, label)
    for name in ("AdamW8bit", "Lion8bit"):
        found[f"bitsandbytes {name}"] = Kind(getattr(bnb, name), lost)
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        make = partial(getattr(ao, name), bf16_stochastic_round=True)
        found[f"torchao {name}, stochastic rounding"] = Kind(make, "unbiased")
    return found


if __name__ == "__main__":
    main()
