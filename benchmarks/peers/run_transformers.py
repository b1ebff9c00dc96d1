"""transformers' own Trainer: `python run_transformers.py PACKS MODEL OUT [--lora]`.

With --lora an adapter is trained that PEFT makes, in fp32 as it does by default.

Positions that restart and no attention mask tell the model that a row is packed: it derives a
block-diagonal causal mask for SDPA.
"""
# pyright: reportMissingImports=false
# transformers, accelerate and peft live in environments of their own.

import sys
import time
from pathlib import Path
from typing import Any

import torch
from packs import NO_TARGET, Packs, StepLog, digest
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)


class PackedRows(Dataset[dict[str, Tensor]]):
    """The packs row by row under the names of the model's arguments."""

    def __init__(self, packs: Packs) -> None:
        columns = {
            "input_ids": packs.tokens_NBS,
            "labels": packs.labels_in_place(),
            "position_ids": packs.positions_NBS,
        }
        self.columns = {name: torch.from_numpy(a).flatten(0, 1) for name, a in columns.items()}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: rows_PS[row] for name, rows_PS in self.columns.items()}


class Watched(Trainer):
    """The Trainer as published; each batch is noted before the Trainer sees it."""

    batch_digest = ""
    batch_targets = 0

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        Watched.batch_digest = digest(inputs["input_ids"].numpy())
        Watched.batch_targets = int((inputs["labels"] != NO_TARGET).sum())
        return super().training_step(model, inputs, num_items_in_batch)


class LogSteps(TrainerCallback):
    """A line for each log of the Trainer; a step lasts from one to the next, data included."""

    def __init__(self, path: Path) -> None:
        self.steps = StepLog(path)
        self.since = 0.0  # of the performance counter, in seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.since = time.perf_counter()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if not logs or "loss" not in logs:  # the summary at the end
            return
        now = time.perf_counter()
        self.steps.step(
            state.global_step,
            loss=logs["loss"],
            seconds=now - self.since,
            tokens=Watched.batch_digest,
            num_targets=Watched.batch_targets,
        )
        self.since = now


def adapted(model: nn.Module) -> nn.Module:
    """Return the model with a LoRA of PEFT on all linear layers of its blocks."""
    from peft import LoraConfig, TaskType, get_peft_model

    settings = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=16,
        lora_alpha=32,
        lora_dropout=0.0,
        target_modules="all-linear",
    )
    return get_peft_model(model, settings)  # pyright: ignore[reportArgumentType]


def main(packs: str, model: str, out: str, *flags: str) -> None:
    """Train once over the packs in their order and leave steps.jsonl in `out`."""
    is_lora = "--lora" in flags
    shared = Packs.load(Path(packs))
    arguments = TrainingArguments(
        output_dir=out,
        use_cpu=True,
        bf16=False,  # would mean autocast: the weights are bf16 already
        per_device_train_batch_size=shared.tokens_NBS.shape[1],
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
        optim="adamw_torch_fused",
        learning_rate=2e-4 if is_lora else 2e-5,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,  # no clipping
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=42,
    )
    network = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        use_cache=False,  # with a cache the model does not look for packed rows
    )
    Watched(
        model=adapted(network) if is_lora else network,
        args=arguments,
        train_dataset=PackedRows(shared),
        data_collator=default_data_collator,
        callbacks=[LogSteps(Path(out) / "steps.jsonl")],
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
