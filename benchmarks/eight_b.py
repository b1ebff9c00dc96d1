"""A full fine-tune of Llama-3.1-8B in 24 GB, without a card.

    python benchmarks/eight_b.py models/random-8b --out docs/benchmarks/eight_b.md

Makes a random Llama-3.1-8B as a Hugging Face folder and lets `tune run` make full optimizer steps
on it: weights resident, 8-bit state in memory-mapped files, two micro-batches in accumulation.
Watches the process from outside, then compares every saved tensor with what it was made from.
Needs Linux, 24 GiB of memory and 62 GiB of disk; --layers and --width try it on a small model.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from figures import GIB, conditions, cpu_name, table, write_figures
from random_model import RandomTensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from solotune.checkpoint.safetensors_file import SourceTensor
from solotune.checkpoint.save import write_json, write_weights
from solotune.checkpoint.stored import stored_weights
from solotune.models.llama import llama, llama3_1_8b

SAMPLING_SECONDS = 0.2
BOS, EOS, BOS_ID, EOS_ID = "<|begin_of_text|>", "<|end_of_text|>", 128000, 128001
PROSE = (
    "A model that does not fit is cut where the knife hurts least. Its weights stay, since every "
    "token needs them twice. A gradient lives as long as one layer is being changed and is gone "
    "before the next is looked at. Of all activations only the entrances of the layers are kept. ",
    "The optimizer remembers two bytes for each parameter and needs them once in a step, in an "
    "order known beforehand. So they wait on the disk, come in while the layer above is still at "
    "work, and go back changed. What the disk sees of it is a long and patient sequence of reads. ",
)


@dataclass(frozen=True)
class Sample:
    """The process at one moment, in bytes."""

    num_steps: int  # logged so far
    anonymous: int
    file: int  # pages of mapped files: state, libraries; the system may drop them
    written: int  # so far: pages dirtied, by writes and in mapped files
    read: int  # so far, from the disk


def main() -> None:
    options = parse_arguments()
    model, run, data = (options.folder / name for name in ("model", "run", "rows.jsonl"))
    num_parameters = make_model(model, layers=options.layers, width=options.width)
    shutil.rmtree(run, ignore_errors=True)
    check_space(options.folder, num_parameters)
    write_rows(data, options)

    words = training_words(model, run, data, options)
    samples = watch(words, run / "metrics.jsonl", threads=options.threads)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changed = changed_shares(model, run / f"step_{options.steps}")
    if not options.keep:
        shutil.rmtree(run)

    text = report(options, words, num_parameters, samples, steps, changed)
    print(f"\n{text}")
    if options.out:
        write_figures(options.out, text, script="eight_b.py")
    if faults := find_faults(options, samples, steps, changed):
        sys.exit(f"error: {'; '.join(faults)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="for model, data and run; a model that is there is used again")
    add("--layers", type=int, default=32)
    add("--width", type=int, default=4096, help="a multiple of 256")
    add("--steps", type=int, default=3, help="optimizer steps")
    add("--tokens", type=int, default=256, help="of a micro-batch")
    add("--micro-batches", type=int, default=2, help="accumulated in a step")
    add("--lr", type=float, default=1e-2)
    add("--prose", action="store_true", help="train on prose: wants --lr 1e-4")
    add("--threads", type=int, default=os.cpu_count())
    add("--limit", type=float, default=19.0, help="GiB of anonymous memory to stay below")
    add("--keep", action="store_true", help="do not delete what the run saves")
    add("--out", type=Path, help="Markdown page whose figures are replaced, or which is made")
    options = parser.parse_args()
    if options.width % 256 or options.width < 256:
        parser.error(f"--width {options.width}: use a multiple of 256")
    options.folder = options.folder.resolve()
    return options


# --- the model ------------------------------------------------------------------------------


def make_model(folder: Path, *, layers: int, width: int) -> int:
    """Write a random model of Llama-3.1-8B's shape, or a smaller one; return its parameters.

    bf16, norms at 1. The host holds the random stream and one tensor at a time.
    """
    with torch.device("meta"):
        heads = max(4, width // 128)
        config = llama3_1_8b().config | {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": width * 7 // 2,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 4,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "torch_dtype": "bfloat16",
        }
        decoder = llama(config)
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    if (folder / "config.json").is_file():
        if json.loads((folder / "config.json").read_text()) != config:
            sys.exit(f"error: {folder} holds another model: delete it, or name another folder")
        return num_parameters

    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    random = RandomTensors()
    sources = []
    for index, (name, parameter) in enumerate(decoder.named_parameters()):
        shape = tuple(parameter.shape)
        make = partial(random.cut, shape, index)
        sources.append(SourceTensor(decoder.to_hf_key(name), torch.bfloat16, shape, make))
    write_weights(folder, sources)
    write_tokenizer(folder)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", config)  # last: a half-made folder has none
    seconds = time.monotonic() - start
    print(f"{num_parameters:,} random parameters in {seconds:.0f} s: {folder}", flush=True)
    return num_parameters


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token a byte, with BOS and EOS at Llama's ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate(alphabet)} | {BOS: BOS_ID, EOS: EOS_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": BOS, "eos_token": EOS})


def write_rows(path: Path, options: argparse.Namespace) -> None:
    """Write a text for each micro-batch: one letter again and again, after one of its own.

    A step of 1e-2 is half the spread of the weights. For 60 different targets it overshoots (loss
    12.7, 26.0, 38.1); with one target downhill is downhill. The first letter is another, or all
    values would be equal and attention without gradients.
    """
    with path.open("w") as file:
        for i in range(options.micro_batches):
            text = chr(ord("b") + i % 25) + "a" * options.tokens
            if options.prose:
                text = PROSE[i % 2] * math.ceil(options.tokens / len(PROSE[0]))
            file.write(json.dumps({"text": text}) + "\n")


def check_space(folder: Path, num_parameters: int) -> None:
    """Stop where the living state, the saved weights and the saved state would not fit."""
    needed = num_parameters * (2.04 + 2 + 2.04) + GIB // 16
    free = shutil.disk_usage(folder).free
    if needed > free:
        sys.exit(
            f"error: the run needs {needed / GIB:.1f} GiB of disk and {folder} has "
            f"{free / GIB:.1f} GiB free: make room, or name a folder on another disk"
        )


# --- the run --------------------------------------------------------------------------------


def training_words(model: Path, run: Path, data: Path, options: argparse.Namespace) -> list[str]:
    """Return what stands behind `tune`; an epoch is one step, so all steps have the same batch."""
    return [
        *"run full_finetune_single_device --config llama3_1/8B_full_single_device".split(),
        f"checkpoint_dir={model}",
        f"output_dir={run}",
        f"dataset={data}",
        "device=cpu",
        "optimizer=bitsandbytes.optim.AdamW8bit",
        f"optimizer.lr={options.lr:g}",
        "lr_scheduler=None",
        "optimizer_in_bwd=True",
        "clip_grad_norm=None",
        "optimizer_state=disk",
        "batch_size=1",
        f"gradient_accumulation_steps={options.micro_batches}",
        f"tokenizer.max_seq_len={options.tokens}",
        f"epochs={options.steps}",
        f"save_every_n_steps={options.steps}",
        "shuffle=False",
        "val_fraction=0",
    ]


def watch(words: list[str], metrics: Path, *, threads: int) -> list[Sample]:
    """Run `tune` to its end; return what /proc told of it meanwhile."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        # glibc's threshold grows to 32 MiB by itself; then gradients and temporaries of that size
        # come from the heap, whose holes are never given back: 21 GiB after half a step.
        "MALLOC_MMAP_THRESHOLD_": str(2**20),
    }
    command = [sys.executable, "-m", "solotune", *words]
    samples = []
    with subprocess.Popen(command, env=environment) as process:
        while process.poll() is None:
            num_steps = metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0
            if sample := take_sample(process.pid, num_steps):
                samples.append(sample)
            time.sleep(SAMPLING_SECONDS)
    if process.returncode:
        sys.exit(f"error: tune ended with {process.returncode}")
    return samples


def take_sample(pid: int, num_steps: int) -> Sample | None:
    """Return what a process holds and has moved, or None where it has ended."""
    try:
        status, io = (Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "io"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = dict(line.split(":", 1) for line in (status + io).splitlines())
    if "RssAnon" not in fields:  # ended, and not yet waited for
        return None
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
    return Sample(
        num_steps=num_steps,
        anonymous=kib["RssAnon"] * 1024,
        file=(kib["RssFile"] + kib["RssShmem"]) * 1024,
        written=int(fields["write_bytes"]),
        read=int(fields["read_bytes"]),
    )


def changed_shares(before: Path, after: Path) -> dict[str, float]:
    """Return for each tensor the share of its entries that differ between two model folders."""
    old, new = stored_weights(before), stored_weights(after)
    shares = {}
    for name, stored in old.items():
        differs = stored.read().view(torch.int16) != new[name].read().view(torch.int16)
        shares[name] = differs.sum().item() / differs.numel()
    return shares


# --- the report -----------------------------------------------------------------------------


def find_faults(
    options: argparse.Namespace, samples: list[Sample], steps: list[dict], changed: dict[str, float]
) -> list[str]:
    """Return what is not as claimed."""
    faults = []
    peak = max(sample.anonymous for sample in samples)
    if peak >= options.limit * GIB:
        faults.append(f"anonymous memory reached {peak / GIB:.2f} GiB of {options.limit:g}")
    losses = [step["loss"] for step in steps]
    if len(losses) != options.steps or None in losses:  # null: not finite
        faults.append(f"{options.steps} finite losses were due, not {losses}")
    elif max(losses[1:]) >= losses[0] or losses[-1] > losses[1]:
        faults.append(f"the loss does not fall: {losses}")
    if same := [name for name, share in changed.items() if not share]:
        faults.append(f"{len(same)} tensors have not changed, {same[0]} first")
    return faults


def report(
    options: argparse.Namespace,
    words: list[str],
    num_parameters: int,
    samples: list[Sample],
    steps: list[dict],
    changed: dict[str, float],
) -> str:
    """Return the Markdown of the docs page: conditions, command, steps, memory, changes."""
    shown = [word.replace(str(options.folder), "models/random-8b") for word in words]
    lines = [" ".join(["tune", *shown[:4]]), *(f"  {word}" for word in shown[4:])]
    num_changed = sum(map(bool, changed.values()))
    least = min(changed, key=changed.__getitem__)
    return "\n\n".join(
        (
            conditions(f"{cpu_name()} ({options.threads} threads)", "torch", "bitsandbytes"),
            f"{options.layers} layers of width {options.width}, {num_parameters:,} parameters in "
            f"bf16. A step: {options.micro_batches} micro-batches of {options.tokens} tokens, the "
            "same in all steps.",
            " \\\n".join(f"    {line}" for line in lines),
            steps_table(samples, steps),
            memory_table(samples, len(steps)),
            f"{num_changed} of {len(changed)} tensors have changed entries; least in {least}: "
            f"{100 * changed[least]:.2g} % of them.",
        )
    )


def steps_table(samples: list[Sample], steps: list[dict]) -> str:
    """Return loss and time of each step, and what it moved to and from the disk."""
    rows, before = [], samples[0]
    for number, step in enumerate(steps, start=1):
        after = next((s for s in samples if s.num_steps >= number), samples[-1])
        written, read = after.written - before.written, after.read - before.read
        seconds = step["seconds_per_step"]
        cells = f"{step['loss']:.4f}", f"{seconds:.0f}", f"{written / 1e9:.1f}", f"{read / 1e9:.1f}"
        rows.append([f"{number}", *cells])
        before = after
    return table(["step", "loss before it", "seconds", "GB written", "GB read"], rows)


def memory_table(samples: list[Sample], num_steps: int) -> str:
    """Return the peaks of each kind of memory by phase of the run."""
    names = ["loading and step 1", *(f"step {number}" for number in range(2, num_steps + 1))]
    rows = []
    for number, name in enumerate([*names, "saving"]):
        phase = [sample for sample in samples if sample.num_steps == number]
        kinds = ([s.anonymous for s in phase], [s.file for s in phase])
        rows.append([name, *(f"{max(kind, default=0) / GIB:.2f}" for kind in kinds)])
    total = max(sample.anonymous for sample in samples) / GIB
    rows.append(["**peak**", f"**{total:.2f}**", f"{max(s.file for s in samples) / GIB:.2f}"])
    return table(["", "anonymous GiB", "mapped files GiB"], rows)


if __name__ == "__main__":
    main()
