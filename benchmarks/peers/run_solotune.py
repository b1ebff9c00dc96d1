"""solotune's recipe: `python run_solotune.py PACKS MODEL OUT [--lora] [key=value ...]`.

Its own command, `tune run`, runs in this process, so that the loader's batches can be noted on
their way out. It makes them itself, from the same data set and seed as the shared packs; that they
are the same is checked afterwards, step by step.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from packs import Packs, StepLog, digest

# pyright cannot follow the mapping of cli/ in pyproject.toml
from solotune.cli.main import main as tune  # pyright: ignore[reportMissingImports]
from solotune.data import Batch, Loader


def note_batches() -> list[str]:
    """Return a list that grows by the digest of each batch that a loader hands out from now on."""
    seen: list[str] = []
    published = Loader.epoch

    def epoch(self: Loader, number: int, start: int = 0) -> Iterator[Batch]:
        for batch in published(self, number, start):
            seen.append(digest(batch.tokens_BS.numpy()))
            yield batch

    Loader.epoch = epoch
    return seen


# What a method decides: all weights or an adapter, each at its usual rate.
FULL = (
    "full_finetune_single_device",
    "--config=smollm2/135M_full_single_device",
    "optimizer.lr=2e-5",
)
LORA = (
    "lora_finetune_single_device",
    "--config=smollm2/135M_lora_single_device",
    "optimizer.lr=2e-4",
)


def main(packs: str, model: str, out: str, *words_given: str) -> None:
    """Train once over the packs in their order and leave steps.jsonl in `out`."""
    overrides = [word for word in words_given if word != "--lora"]
    steps, batch_size, row_length = Packs.load(Path(packs)).tokens_NBS.shape
    run = Path(out) / "run"
    batches = note_batches()
    words = [
        "run",
        *(LORA if "--lora" in words_given else FULL),
        f"checkpoint_dir={model}",
        f"output_dir={run}",
        "dataset=solotune.data.pydoc_dataset",
        "dataset_val=null",
        "val_fraction=0",
        f"tokenizer.max_seq_len={row_length}",
        f"batch_size={batch_size}",
        "gradient_accumulation_steps=1",
        "epochs=1",
        f"max_steps_per_epoch={steps}",
        "optimizer=torch.optim.AdamW",
        "optimizer.fused=True",
        "optimizer.weight_decay=0",
        "lr_scheduler=null",
        "clip_grad_norm=null",
        "enable_activation_checkpointing=True",
        "dtype=bf16",
        "device=cpu",
        "seed=42",
        "log_every_n_steps=1",
        "plan=False",  # draws a batch, which is none of the work
        *overrides,
    ]
    if code := tune(words):
        sys.exit(code)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    logged = [line for line in lines if "loss" in line]
    log = StepLog(Path(out) / "steps.jsonl")
    for line, tokens in zip(logged, batches, strict=True):
        log.step(
            line["step"],
            loss=line["loss"],
            seconds=line["seconds_per_step"],
            tokens=tokens,
            num_targets=line["num_targets"],
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
