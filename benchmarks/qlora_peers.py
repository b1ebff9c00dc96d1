"""QLoRA's loss, step by step, beside transformers, PEFT and bitsandbytes' Linear4bit.

    python benchmarks/qlora_peers.py models/SmolLM2-135M-Instruct \
        --out docs/benchmarks/qlora_peers.md

The same adapter over the same 4-bit base sees the same rows of this project's docs. Exit code 1
where a loss differs by more than 1 %, or where a byte of the base has changed.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from figures import ROOT, conditions, cpu_name, table, write_figures
from torch import Tensor

from solotune.adapters import (
    LoRA,
    adapter_parameters,
    four_bit_linears,
    initialize,
    inject,
    quantize_linears,
)
from solotune.checkpoint import load_weights
from solotune.data.batch import Batch, collate
from solotune.losses import LinearCrossEntropy
from solotune.models import Decoder, auto
from solotune.tokenizers import auto as load_tokenizer
from solotune.training import pick_device, set_dtype

MOST = 0.01  # relative difference of a loss
ADAPTER = LoRA(rank=16, alpha=32, targets="all-linear")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a Hugging Face folder, unquantised")
    parser.add_argument("--device", default="auto", help="cuda or cpu; auto: what is there")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--out", type=Path, help="Markdown page whose figures are replaced")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = pick_device(options.device)

    rows = list(docs_rows(options.model, options.steps, options.tokens))
    found, first, unchanged = our_losses(options.model, device, rows, options.lr)
    wanted = their_losses(options.model, device, rows, options.lr, first)
    differences = [abs(a / b - 1) for a, b in zip(found, wanted, strict=True)]
    lines = [
        [str(step), f"{a:.4f}", f"{b:.4f}", f"{d:.2%}"]
        for step, (a, b, d) in enumerate(zip(found, wanted, differences, strict=True), start=1)
    ]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    text = (
        f"{conditions(where, 'torch', 'bitsandbytes', 'transformers', 'peft')}\n\n"
        f"{options.model.name}, rank {ADAPTER.rank} on all linear layers, AdamW at {options.lr}, "
        f"{options.tokens} tokens a step. Largest difference **{max(differences):.2%}**; the "
        f"base's bytes are {'unchanged' if unchanged else 'CHANGED'}.\n\n"
        f"{table(['step', 'solotune', 'transformers and PEFT', 'difference'], lines)}"
    )
    print(text)
    if options.out:
        write_figures(options.out, text, script="qlora_peers.py")
    sys.exit(0 if unchanged and max(differences) <= MOST else 1)


def docs_rows(folder: Path, steps: int, length: int) -> Iterator[Batch]:
    """Yield batches of one row of this project's docs."""
    tokenizer = load_tokenizer(checkpoint_dir=folder)
    tokens: list[int] = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        tokens += tokenizer.encode(page.read_text(encoding="utf-8"), add_bos=False)
    for step in range(steps):
        row_S = np.array(tokens[step * length : (step + 1) * length])
        yield collate([[(row_S, np.ones(length, bool))]], row_length=length, max_segments=1)


def our_losses(
    folder: Path, device: torch.device, batches: list[Batch], lr: float
) -> tuple[list[float], dict[str, Tensor], bool]:
    """Return the losses, the first numbers by PEFT's names, and whether the base is unchanged."""
    with torch.device("meta"):
        model = auto(folder)
    set_dtype(model, torch.bfloat16)
    quantize_linears(model)
    inject(model, ADAPTER)
    print(*load_weights(model, folder, device=device).lines(), sep="\n", flush=True)
    initialize(model, seed=1)
    before = {name: layer.weight.clone() for name, layer in four_bit_linears(model).items()}
    adapter = adapter_parameters(model)
    first = {
        f"base_model.model.{model.to_hf_key(name)}": p.detach().clone()
        for name, p in adapter.items()
    }
    found = losses(list(adapter.values()), batches, lambda batch: our_loss(model, batch), lr)
    same = all(torch.equal(model.get_parameter(name), packed) for name, packed in before.items())
    return found, first, same


def our_loss(model: Decoder, batch: Batch) -> Tensor:
    loss_fn = LinearCrossEntropy(chunk_tokens=256)
    context = model.context(batch.positions_BS, batch.segments_BM)
    hidden_BSD = model.hidden_states(model.embed(batch.tokens_BS), context)
    return loss_fn(hidden_BSD, model.head, batch, batch.num_targets)


def their_losses(
    folder: Path, device: torch.device, batches: list[Batch], lr: float, first: dict[str, Tensor]
) -> list[float]:
    """Return the losses of PEFT's adapter, which begins with `first`, over Linear4bit."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=settings, device_map=str(device)
    )
    config = LoraConfig(
        r=ADAPTER.rank,
        lora_alpha=int(ADAPTER.alpha),
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model: Any = get_peft_model(base, config)
    loaded = set_peft_model_state_dict(model, first)
    assert not loaded.unexpected_keys
    trained = [p for p in model.train().parameters() if p.requires_grad]
    return losses(trained, batches, lambda batch: their_loss(model, batch), lr)


def their_loss(model: Any, batch: Batch) -> Tensor:
    logits_SV = model(input_ids=batch.tokens_BS).logits[0].float()
    return F.cross_entropy(logits_SV[:-1], batch.tokens_BS[0, 1:])


def losses(
    trained: list[torch.nn.Parameter],
    batches: list[Batch],
    loss_of: Callable[[Batch], Tensor],
    lr: float,
) -> list[float]:
    """Step the adapter once a batch; return the losses."""
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    found = []
    for batch in batches:
        loss = loss_of(batch.to(trained[0].device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
        print(f"step {len(found)}: {found[-1]:.4f}", flush=True)
    return found


if __name__ == "__main__":
    main()
