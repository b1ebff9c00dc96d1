"""A linear layer in 4 bits: what it takes, how long it lasts, how far it is off, way by way.

    python benchmarks/nf4.py --out docs/qlora.md

Times are medians over rounds in which every way runs once, by those of the layer in bf16.
"""

import argparse
import importlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from figures import conditions, cpu_name, table, write_figures
from torch import Tensor

from solotune.adapters import FourBit
from solotune.adapters.nf4 import pack
from solotune.adapters.nf4_product import dense_weight, linear
from solotune.training import pick_device


@dataclass
class Way:
    """A layer with a weight: the product with it, and the weight as numbers."""

    product: Callable[[Tensor], Tensor]
    dense: Callable[[], Tensor]
    parts: list[Tensor]


def bf16(weight: Tensor) -> Way:
    return Way(lambda x: F.linear(x, weight), lambda: weight, [weight])


def solotune(weight: Tensor) -> Way:
    layout = FourBit(len(weight), weight.size(1))
    packed = torch.empty(layout.num_bytes, dtype=torch.uint8, device=weight.device)
    pack(weight, packed, layout)
    return Way(
        lambda x: linear(x, packed, None, layout),
        lambda: dense_weight(packed, layout, weight.dtype),
        [packed],
    )


def bitsandbytes(weight: Tensor) -> Way:
    bnb: Any = importlib.import_module("bitsandbytes")  # which has no types
    functional = bnb.functional
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return Way(
        lambda x: bnb.matmul_4bit(x, codes, state),
        lambda: functional.dequantize_4bit(codes, state),
        [codes, state.absmax, state.state2.absmax, state.offset, state.code, state.state2.code],
    )


def torchao(weight: Tensor) -> Way:
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    packed: Any = nf4_tensor.to_nf4(weight)
    names = packed.__tensor_flatten__()[0]
    return Way(
        lambda x: nf4_tensor.linear_nf4(x, packed),
        packed.get_original_weight,
        [getattr(packed, name) for name in names],
    )


WAYS = {"bf16": bf16, "solotune": solotune, "bitsandbytes": bitsandbytes, "torchao": torchao}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda or cpu; auto: what is there")
    parser.add_argument("--shape", type=int, nargs=2, default=(8192, 2048), help="out and in")
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 2048), help="rows of x")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="Markdown page whose figures are replaced")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = pick_device(options.device)
    out_features, in_features = options.shape
    weight = (0.02 * torch.randn(out_features, in_features, device=device)).bfloat16()

    ways, quantising = {}, {}
    for name, make in WAYS.items():
        make(weight)  # what is imported and cached at the first time
        ways[name], quantising[name] = timed(lambda make=make: make(weight), device)
    rows = {name: [name, *first_cells(weight, way)] for name, way in ways.items()}
    for name, cells in rows.items():
        nanoseconds = 1e9 * quantising[name] / weight.numel()
        cells.append("" if name == "bf16" else f"{nanoseconds:.2f}")
    for tokens in options.tokens:
        x = torch.randn(tokens, in_features, device=device).bfloat16()
        for column in measured(ways, x, options.rounds, device):
            plain = median(column["bf16"])
            for name, cells in rows.items():
                shown = f"{1e3 * plain:.2f} ms" if name == "bf16" else None
                cells.append(shown or f"{median(column[name]) / plain:.2f}")

    header = ["", "bits a parameter", "error", "quantising, ns a parameter"]
    for tokens in options.tokens:
        header += [f"forward, {tokens} tokens", f"and backward, {tokens}"]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    where += f" ({torch.get_num_threads()} threads)" if device.type == "cpu" else ""
    text = (
        f"{conditions(where, 'torch', 'bitsandbytes', 'torchao')}\n\n"
        f"A weight of {out_features} x {in_features}. Error: relative, L2.\n\n"
        f"{table(header, list(rows.values()))}"
    )
    print(text)
    if options.out:
        write_figures(options.out, text, script="nf4.py")


def first_cells(weight: Tensor, way: Way) -> list[str]:
    """Return the bits a parameter and the relative error."""
    bits = 8 * sum(part.nbytes for part in way.parts) / weight.numel()
    error = (way.dense().float() - weight.float()).norm() / weight.float().norm()
    return [f"{bits:.3f}".removesuffix(".000"), f"{float(error):.4f}".removesuffix("0.0000")]


def measured(
    ways: dict[str, Way], x: Tensor, rounds: int, device: torch.device
) -> Iterator[dict[str, list[float]]]:
    """Yield the seconds of each way's forward, and of its forward and backward, round by round."""
    x_trained = x.clone().requires_grad_()
    grad = torch.ones(len(x), len(next(iter(ways.values())).dense()), device=device).bfloat16()

    def backward(way: Way) -> None:
        way.product(x_trained).backward(grad)
        x_trained.grad = None

    def forward(way: Way) -> None:
        with torch.no_grad():
            way.product(x)

    for run in (forward, backward):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, way in ways.items():
                _, took = timed(lambda run=run, way=way: run(way), device)
                if number:  # the first warms up
                    seconds[name].append(took)
        yield seconds


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return what `run` returns, and the seconds until the device is done with it."""
    _wait(device)
    start = time.perf_counter()
    result = run()
    _wait(device)
    return result, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
