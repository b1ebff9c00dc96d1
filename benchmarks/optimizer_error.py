"""How far each optimizer's bf16 weights are from a float64 run on the same gradients.

    python benchmarks/optimizer_error.py --out docs/benchmarks/optimizer_error.md

One matrix of usual weights, gradients with a drift in noise whose sizes differ a hundredfold inside
a row. The reference is the same algorithm in float64. Error: the distance of the weights, with what
an optimizer remembers of them, by the norm of the reference's change. Decay: what arrives of the
weight decay, from a second run without it. Where weights are rounded at random, the mean over
SEEDS runs stands beside: noise averages out, a lost update does not.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from figures import conditions, cpu_name, table, write_figures
from torch import Tensor, nn

from solotune.optim import AdamWKahan, LionKahan
from solotune.optim.rounding import join

ROWS, COLUMNS, SEEDS = 128, 512, 8
RUNS = ((300, 1e-5), (1000, 5e-5))  # steps, lr
DECAY = 0.1

Make = Callable[..., Any]


@dataclass(frozen=True)
class Kind:
    """An optimizer: how it is made, what it approximates, and the dtype of its weights."""

    make: Make
    reference: str  # adamw, lion or adafactor
    dtype: torch.dtype = torch.bfloat16
    at_random: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="Markdown page whose figures are replaced")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.cache_size_limit = 64
    exact = {
        (name, steps, lr, decay): reference(name, steps, lr=lr, weight_decay=decay)
        for name in ("adamw", "lion", "adafactor")
        for steps, lr in RUNS
        for decay in (DECAY, 0.0)
    }
    rows = []
    for name, kind in kinds().items():
        cells = [name]
        for steps, lr in RUNS:
            cells += measure(kind, exact, steps, lr)
        rows.append(cells)
        print("  ".join(cells), flush=True)
    header = ["optimizer"]
    for steps, lr in RUNS:
        header += [f"error, {steps} at {lr:.0e}", "mean", "decay that arrives"]
    where = conditions(cpu_name(), "torch", "torchao", "bitsandbytes")
    text = f"{where}\n\n{table(header, rows)}"
    print(f"\n{text}")
    if options.out:
        write_figures(options.out, text, script="optimizer_error.py")


def kinds() -> dict[str, Kind]:
    """Return what is measured, by name."""
    import bitsandbytes.optim as bnb
    import torchao.optim as ao

    fused = partial(torch.optim.AdamW, fused=True)
    found = {
        "torch AdamW, fp32 weights": Kind(fused, "adamw", torch.float32),
        "torch AdamW": Kind(fused, "adamw"),
        "torch Adafactor": Kind(torch.optim.Adafactor, "adafactor"),
    }
    for residual in ("int16", "int8", "none"):
        for state in ("fp32", "bf16", "int8"):
            for label, ours in (("AdamWKahan", AdamWKahan), ("LionKahan", LionKahan)):
                found[f"{label} residual {residual}, state {state}"] = Kind(
                    partial(ours, residual=residual, state_dtype=state),
                    "lion" if ours is LionKahan else "adamw",
                    at_random=(residual, state) != ("int16", "fp32"),
                )
    for name in ("AdamW8bit", "PagedAdamW8bit", "Lion8bit"):
        algorithm = "lion" if "Lion" in name else "adamw"
        found[f"bitsandbytes {name}"] = Kind(getattr(bnb, name), algorithm)
    found["bitsandbytes AdamW8bit, fp32 weights"] = Kind(bnb.AdamW8bit, "adamw", torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        for at_random in (False, True):
            label = f"torchao {name}" + (", stochastic rounding" if at_random else "")
            make = partial(getattr(ao, name), bf16_stochastic_round=at_random)
            found[label] = Kind(make, "adamw", at_random=at_random)
    return found


def measure(
    kind: Kind, exact: dict[tuple[str, int, float, float], Tensor], steps: int, lr: float
) -> list[str]:
    """Return the cells of one run: error, error of the mean over seeds, share of the decay."""
    wanted, undecayed = (exact[kind.reference, steps, lr, decay] for decay in (DECAY, 0.0))
    change = (wanted - start().double()).norm()
    seeds = range(SEEDS if kind.at_random else 1)
    runs = [train(kind, steps, seed=seed, lr=lr, weight_decay=DECAY) for seed in seeds]
    without = [train(kind, steps, seed=seed, lr=lr, weight_decay=0.0) for seed in seeds]
    error = mean(float((run - wanted).norm() / change) for run in runs)
    of_mean = float((torch.stack(runs).mean(0) - wanted).norm() / change)
    sign = start().double().sign()
    arrived = ((torch.stack(without).mean(0) - torch.stack(runs).mean(0)) * sign).sum()
    share = float(arrived / ((undecayed - wanted) * sign).sum())
    return [f"{error:.4f}", f"{of_mean:.4f}" if kind.at_random else "", f"{share:.0%}"]


def train(kind: Kind, steps: int, *, seed: int, **settings: Any) -> Tensor:
    """Return the weights of a run, with what the optimizer remembers of them."""
    torch.manual_seed(seed)
    parameter = nn.Parameter(start().to(kind.dtype))
    keyed = isinstance(kind.make, partial) and kind.make.func in (AdamWKahan, LionKahan)
    ours = {"seed": seed, "dither": False} if keyed else {}  # from where the reference starts
    optimizer = kind.make([parameter], **settings, **ours)
    for grad in gradients(steps):
        parameter.grad = grad.to(kind.dtype)
        optimizer.step()
    remainder = optimizer.state[parameter].get("remainder")
    if remainder is None:
        return parameter.detach().double()
    return join(parameter.detach().view(-1), remainder.view(-1)).view(ROWS, COLUMNS).double()


def reference(name: str, steps: int, *, lr: float, weight_decay: float) -> Tensor:
    """Return the weights of a float64 run."""
    parameter = nn.Parameter(start().double())
    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    makers: dict[str, Make] = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
    optimizer = None if name == "lion" else makers[name]([parameter], **settings)
    momentum = torch.zeros_like(parameter)
    with torch.no_grad():
        for grad in gradients(steps):
            if optimizer is not None:
                parameter.grad = grad.double()
                optimizer.step()
                continue
            update = (0.9 * momentum + 0.1 * grad.double()).sign()
            momentum = 0.99 * momentum + 0.01 * grad.double()
            parameter.sub_(lr * (update + weight_decay * parameter))
    return parameter.detach()


def start() -> Tensor:
    """Return usual weights, exact in bf16."""
    generator = torch.Generator().manual_seed(0)
    return (0.05 * torch.randn(ROWS, COLUMNS, generator=generator)).bfloat16()


def gradients(steps: int) -> Iterator[Tensor]:
    """Yield the gradients of a run, the same each time."""
    generator = torch.Generator().manual_seed(1)
    drift = 0.5 * torch.randn(ROWS, COLUMNS, generator=generator)
    sizes = torch.logspace(-2, 0, COLUMNS)
    for _ in range(steps):
        yield ((drift + torch.randn(ROWS, COLUMNS, generator=generator)) * sizes).bfloat16()


if __name__ == "__main__":
    main()
