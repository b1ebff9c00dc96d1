"""Host memory that a 4-bit model takes to load, and its adapter to be saved.

    python benchmarks/adapter_save.py /tmp/adapter_save --out docs/benchmarks/adapter_save.md

A folder with random weights in the shape of a 1B model is written to WORK and removed afterwards.
Host memory is the process's anonymous memory (RssAnon), watched by a thread; the figures are rises
above what was there before. Exit code 1 where a limit is not kept, or a byte of the base changed.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from figures import MIB, conditions, cpu_name, table, write_figures
from random_model import RandomTensors
from torch import nn

from solotune.adapters import (
    LoRA,
    adapter_parameters,
    four_bit_linears,
    initialize,
    inject,
    quantize_linears,
)
from solotune.adapters.nf4_product import check_works
from solotune.checkpoint import Checkpointer
from solotune.checkpoint.safetensors_file import SourceTensor
from solotune.checkpoint.save import write_weights
from solotune.models import Decoder
from solotune.models.llama import llama3_2_1b, smollm2_135m
from solotune.tokenizers import auto as load_tokenizer
from solotune.training import check_weights, set_dtype

SHAPES = {"1B": llama3_2_1b, "135M": smollm2_135m}
MOST_OF_A_SAVE = 100e6  # bytes
SLACK = 64 * MIB  # of the allocator, libraries and what is quantised at once


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="folder to write to, 2.5 GB for 1B")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--shape", choices=SHAPES, default="1B")
    parser.add_argument("--out", type=Path, help="Markdown page whose figures are replaced")
    options = parser.parse_args()

    base = options.work / "base"
    with torch.device("meta"):
        write_base(base, SHAPES[options.shape](), options.tokenizer)
    try:
        rows, kept = measured(base, options.work / "run", SHAPES[options.shape])
    finally:
        shutil.rmtree(options.work)
    text = (
        f"{conditions(cpu_name(), 'torch', 'bitsandbytes')}\n\n"
        f"{table([f'{options.shape}, blocks in nf4', 'MB', 'at most'], rows)}"
    )
    print(text)
    if options.out:
        write_figures(options.out, text, script="adapter_save.py")
    sys.exit(0 if kept else 1)


def measured(base: Path, run: Path, build: Callable[[], Decoder]) -> tuple[list[list[str]], bool]:
    """Load, step once, save; return the table's rows and whether all limits were kept."""
    with torch.device("meta"):
        model = build()
    set_dtype(model, torch.bfloat16)
    largest = max(p.numel() for layer in model.blocks.children() for p in layer.parameters())
    quantize_linears(model)
    adapter = LoRA(rank=16, alpha=32, targets="all-linear")
    inject(model, adapter)
    checkpoint = Checkpointer(base, run)
    tokenizer = load_tokenizer(checkpoint_dir=base)
    check_works(torch.device("cpu"))  # its libraries are loaded
    with rise() as loading:
        checkpoint.load_weights(model, device="cpu")
    initialize(model, 0)
    num_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)

    trained = list(adapter_parameters(model).values())
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    before = digest(model)
    with rise() as saving:
        check_weights(1, model)
        checkpoint.save(
            1,
            model=model,
            optimizer=optimizer,
            progress={"step": 1},
            dtype=torch.bfloat16,
            tokenizer=tokenizer,
            adapter=adapter,
        )
    unchanged = digest(model) == before
    in_bf16 = 2 * sum(layer.layout.num_numbers for layer in four_bit_linears(model).values())
    in_bf16 += num_bytes - sum(layer.layout.num_bytes for layer in four_bit_linears(model).values())
    most_of_loading = num_bytes + 2 * largest + SLACK
    rows = [
        ["the model in bf16", megabytes(in_bf16), ""],
        ["the model", megabytes(num_bytes), ""],
        ["rise while it loads", megabytes(loading[0]), megabytes(most_of_loading)],
        ["the adapter and its state", megabytes(3 * sum(p.nbytes for p in trained)), ""],
        ["rise while it is saved", megabytes(saving[0]), megabytes(MOST_OF_A_SAVE)],
        ["bytes of the base", "unchanged" if unchanged else "CHANGED", "unchanged"],
    ]
    kept = loading[0] < most_of_loading and saving[0] < MOST_OF_A_SAVE
    return rows, kept and unchanged


def write_base(folder: Path, model: Decoder, tokenizer: Path) -> None:
    """Write a folder with random weights for a model on meta, one tensor at a time."""
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.json"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    (folder / "config.json").write_text(json.dumps(model.config | {"torch_dtype": "bfloat16"}))
    random = RandomTensors()

    def source(index: int, name: str, parameter: nn.Parameter) -> SourceTensor:
        shape = tuple(parameter.shape)
        return SourceTensor(
            model.to_hf_key(name), torch.bfloat16, shape, lambda: random.cut(shape, index)
        )

    named = enumerate(model.named_parameters())
    write_weights(folder, [source(index, *pair) for index, pair in named])


@contextmanager
def rise() -> Iterator[list[int]]:
    """Yield a list that holds, afterwards, by how much anonymous memory was above its start."""
    before = peak = anonymous_bytes()
    result: list[int] = []
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield result
    finally:
        done.set()
        thread.join()
        result.append(max(peak, anonymous_bytes()) - before)


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", status)[0])


def digest(model: Decoder) -> str:
    """Return a digest of every frozen weight's bytes."""
    found = hashlib.blake2b()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            found.update(parameter.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f}"


if __name__ == "__main__":
    main()
