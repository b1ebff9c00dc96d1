"""Tiny Llama models with weights that make logits of usual size, and batches of given segments.

Shapes: B batch, S tokens, D width, V vocabulary, M segments a row.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solotune.data.batch import Batch, collate
from solotune.losses import LinearCrossEntropy
from solotune.memory import HostMemory, offload_activations
from solotune.models import Decoder
from solotune.models.llama import llama
from solotune.models.norm import RMSNorm

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}


def fill_(model: Decoder, *, seed: int = 0) -> Decoder:
    """Give matrices a spread of 1/sqrt(columns), the output weight twice that; scales about 1.

    What a norm adds to its weight (Gemma) counts to the scale.
    """
    offsets = {
        f"{name}.weight": module.offset
        for name, module in model.named_modules()
        if isinstance(module, RMSNorm)
    }
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.size(1) ** -0.5)
            else:
                middle = 0.0 if name.endswith("bias") else 1.0 - offsets.get(name, 0.0)
                parameter.copy_(0.2 * noise + middle)
        model.output_weight.mul_(2)
    return model


def tiny(*, seed: int = 0, **fields: Any) -> Decoder:
    """Return a filled fp32 model; `fields` replace those of CONFIG, None leaves one out."""
    config = {name: value for name, value in (CONFIG | fields).items() if value is not None}
    return fill_(llama(config), seed=seed)


def make_batch(
    *rows: Sequence[int], row_length: int | None = None, vocab: int = 256, seed: int = 0
) -> Batch:
    """Return a batch of random tokens, each row given as the lengths of its segments.

    Every position but a segment's last has a target.
    """
    random = np.random.default_rng(seed)
    segments = [
        [(random.integers(vocab, size=length), np.ones(length, bool)) for length in lengths]
        for lengths in rows
    ]
    return collate(
        segments,
        row_length=row_length or max(map(sum, rows)),
        max_segments=max(map(len, rows)),
    )


def segments_of(batch: Batch) -> list[Tensor]:
    """Return the tokens of each segment, in order."""
    found = []
    for tokens_S, lengths_M in zip(batch.tokens_BS, batch.segments_BM.tolist(), strict=True):
        found += tokens_S[: sum(lengths_M)].split([length for length in lengths_M if length])
    return found


def unpacked(batch: Batch) -> Batch:
    """Return the same segments, each in a row of its own, with filler behind."""
    rows = [[(tokens_S.numpy(), np.ones(len(tokens_S), bool))] for tokens_S in segments_of(batch)]
    longest = int(batch.segments_BM.max())
    return collate(rows, row_length=longest, max_segments=1)


def real_rows(batch: Batch) -> Tensor:
    """Return a mask (B, S) of the positions that are no filler."""
    return torch.arange(batch.tokens_BS.size(1)) < batch.segments_BM.sum(1, keepdim=True)


def forward(
    model: Decoder, batch: Batch, *, x_BSD: Tensor | None = None, host: HostMemory | None = None
) -> Tensor:
    """Return hidden_BSD as a recipe computes it; with `host`, block inputs are offloaded.

    `x_BSD` is the embedded batch, where its gradient is wanted.
    """
    x_BSD = model.embed(batch.tokens_BS) if x_BSD is None else x_BSD
    context = model.context(batch.positions_BS, batch.segments_BM, key=batch.key)
    around_block = nullcontext
    if host is not None:
        keep = (*model.parameters(), *context.tensors(), x_BSD)
        around_block = offload_activations(host, keep=keep)
    return model.hidden_states(x_BSD, context, around_block=around_block)


@torch.no_grad()
def logits(model: Decoder, batch: Batch) -> Tensor:
    """Return logits_BSV."""
    return model.logits(forward(model, batch))


def accumulate_gradients(
    model: Decoder, batches: Sequence[Batch], *, host: HostMemory | None = None
) -> Tensor:
    """Do forward and backward as a recipe does; return the mean loss over all targets."""
    loss_fn = LinearCrossEntropy(chunk_tokens=16, soft_cap=model.logit_soft_cap)
    num_targets = sum(batch.num_targets for batch in batches)
    total, embedded = torch.zeros((), device=model.device), []
    for batch in batches:
        x_BSD = model.embed(batch.tokens_BS).requires_grad_()
        hidden_BSD = forward(model, batch, x_BSD=x_BSD, host=host)
        loss = loss_fn(hidden_BSD, model.head, batch, num_targets)
        loss.backward()
        total += loss.detach()
        embedded.append((batch.tokens_BS, x_BSD.grad))
    model.add_embedding_gradient(embedded)
    return total


def take_gradients(model: Decoder) -> dict[str, Tensor]:
    """Return the gradients by parameter name, and clear them."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients
