"""transformers' model with the config and weights of ours, and the same steps for both.

Shapes: B batch, S tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from solotune.data.batch import Batch
from solotune.models import Decoder
from solotune.optim import decay_groups

from .tiny import accumulate_gradients, logits, segments_of, unpacked


def oracle(model: Decoder) -> PreTrainedModel:
    """Return transformers' model with the config and the weights of `model`."""
    fields: dict[str, Any] = model.config
    config = AutoConfig.for_model(**fields)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {model.to_hf_key(name): p.detach() for name, p in model.named_parameters()}
    weights["lm_head.weight"] = model.output_weight.detach()
    theirs.load_state_dict(weights)
    return theirs


@torch.no_grad()
def logits_of(theirs: PreTrainedModel, tokens_S: Tensor) -> Tensor:
    """Return logits_SV of one sequence, without padding."""
    return theirs(tokens_S.unsqueeze(0)).logits[0]


def by_segment(batch: Batch, x_BSV: Tensor) -> list[Tensor]:
    """Return the rows of each segment, in order."""
    found = []
    for x_SV, lengths_M in zip(x_BSV, batch.segments_BM.tolist(), strict=True):
        found += x_SV[: sum(lengths_M)].split([length for length in lengths_M if length])
    return found


def check_packed_logits(model: Decoder, packed: Batch, *, spread: tuple[float, float]) -> None:
    """Assert that packed, unpacked and transformers' logits agree to 1e-4.

    `spread` bounds the standard deviation of the logits: what agrees where all are alike says
    nothing.
    """
    alone, theirs = unpacked(packed), oracle(model)
    for tokens_S, packed_SV, alone_SV in zip(
        segments_of(packed),
        by_segment(packed, logits(model, packed)),
        by_segment(alone, logits(model, alone)),
        strict=True,
    ):
        wanted_SV = logits_of(theirs, tokens_S)
        assert spread[0] < wanted_SV.std() < spread[1]
        torch.testing.assert_close(packed_SV, wanted_SV, atol=1e-4, rtol=0)
        torch.testing.assert_close(alone_SV, wanted_SV, atol=1e-4, rtol=0)


def ten_losses(
    ours: Decoder, theirs: PreTrainedModel, batches: Sequence[Batch]
) -> tuple[Tensor, Tensor]:
    """Step both ten times with AdamW over all batches; return their losses, and change both."""
    our_optimizer = torch.optim.AdamW(decay_groups(ours), lr=3e-3, weight_decay=0.1)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    their_optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3,
        weight_decay=0.1,
    )
    return step_ten_times(ours, our_optimizer, theirs, their_optimizer, batches)


def step_ten_times(
    ours: Decoder,
    our_optimizer: Optimizer,
    theirs: Any,
    their_optimizer: Optimizer,
    batches: Sequence[Batch],
) -> tuple[Tensor, Tensor]:
    """Step both models by their optimizers over all batches; return their losses."""
    sequences = [tokens_S for batch in batches for tokens_S in segments_of(batch)]
    num_targets = sum(batch.num_targets for batch in batches)

    our_losses, their_losses = [], []
    for _ in range(10):
        our_losses.append(accumulate_gradients(ours, batches))
        our_optimizer.step()
        our_optimizer.zero_grad()

        total = torch.zeros(())
        for tokens_S in sequences:
            logits_SV = theirs(input_ids=tokens_S.unsqueeze(0)).logits[0]
            loss = F.cross_entropy(logits_SV[:-1], tokens_S[1:], reduction="sum") / num_targets
            loss.backward()
            total += loss.detach()
        their_losses.append(total)
        their_optimizer.step()
        their_optimizer.zero_grad()
    return torch.stack(our_losses), torch.stack(their_losses)
