"""The same bf16 steps with norm scales in fp32 and in bf16: what is lost where they cannot move.

python benchmarks/norm_dtype.py --model models/SmolLM2-135M-Instruct --out docs/benchmarks/peers.md
"""

import argparse
from pathlib import Path

import torch
from figures import table, write_figures

from solotune.checkpoint import load_weights
from solotune.data import make_loader, pydoc_dataset
from solotune.losses import LinearCrossEntropy
from solotune.models import auto
from solotune.tokenizers import auto as auto_tokenizer
from solotune.training import set_dtype


def losses(folder: Path, *, norm_dtype: torch.dtype, steps: int, lr: float) -> list[float]:
    """Return the loss of each step of AdamW on packs of 2 x 512 tokens."""
    with torch.device("meta"):
        model = auto(folder)
    set_dtype(model, torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.to(norm_dtype)
    load_weights(model, folder, device="cpu")
    tokenizer = auto_tokenizer(folder, max_seq_len=512)
    loader = make_loader(pydoc_dataset(tokenizer), batch_size=2, max_seq_len=512, seed=42)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    loss_fn = LinearCrossEntropy()
    values = []
    for _, batch in zip(range(steps), loader.epoch(0), strict=False):
        x_BSD = model.embed(batch.tokens_BS).requires_grad_()
        context = model.context(batch.positions_BS, batch.segments_BM)
        hidden_BSD = model.hidden_states(x_BSD, context)
        loss = loss_fn(hidden_BSD, model.output_weight, batch, batch.num_targets)
        loss.backward()
        model.add_embedding_gradient([(batch.tokens_BS, x_BSD.grad)])
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--out", type=Path, help="a page with the marked region")
    options = parser.parse_args()
    run = {"steps": options.steps, "lr": options.lr}
    in_fp32 = losses(options.model, norm_dtype=torch.float32, **run)
    in_bf16 = losses(options.model, norm_dtype=torch.bfloat16, **run)
    pairs = enumerate(zip(in_fp32, in_bf16, strict=True), 1)
    rows = [[f"{step}", f"{fp32:.4f}", f"{bf16:.4f}"] for step, (fp32, bf16) in pairs]
    text = table(["step", "norms in fp32", "norms in bf16"], rows)
    print(text)
    if options.out:
        write_figures(options.out, text, script="norm_dtype.py")


if __name__ == "__main__":
    main()
