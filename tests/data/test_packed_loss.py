"""Packed rows train as the same samples unpacked, whatever shares a micro-batch.

Shapes: B rows, S positions, D width.
"""

import numpy as np
import pytest
import torch

from solotune.data import Batching, Loader, Report, SampleSet, accumulation_groups, make_loader
from solotune.losses import LinearCrossEntropy
from solotune.models import Decoder
from solotune.models.llama import llama

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 48,
    "tie_word_embeddings": False,
}
CAPACITY = 32


@pytest.fixture(scope="module")
def model() -> Decoder:
    model = llama(CONFIG)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def random_samples(random: np.random.Generator, batching: Batching) -> SampleSet:
    """1 to 24 samples of 2 to 32 tokens, between none and all of them trained."""
    lengths_N = random.integers(2, CAPACITY + 1, random.integers(1, 25))
    total = int(lengths_N.sum())
    return SampleSet(
        tokens_T=random.integers(0, CONFIG["vocab_size"], total, dtype=np.int32),
        trained_T=(random.random(total) < random.random()).astype(np.uint8),
        lengths_N=lengths_N,
        rows_N=np.arange(len(lengths_N), dtype=np.uint64),
        report=Report("random", None),
        batching=batching,
    )


def mean_loss(model: Decoder, loader: Loader, accumulation: int) -> tuple[float, torch.Tensor]:
    """The mean over all targets of an epoch, and its gradient, in steps of `accumulation`.

    Each step has its own count of targets, as in training; the steps are weighed by theirs.
    """
    loss_fn = LinearCrossEntropy()
    total = torch.zeros((), dtype=torch.float64)
    model.zero_grad()
    for group in accumulation_groups(loader.epoch(0), accumulation):
        num_targets = sum(batch.num_targets for batch in group)
        for batch in group:
            x_BSD = model.embed(batch.tokens_BS)
            hidden_BSD = model.hidden_states(
                x_BSD, model.context(batch.positions_BS, batch.segments_BM)
            )
            loss = loss_fn(hidden_BSD, model.output_weight, batch, num_targets)
            weighed = loss * (num_targets / max(loader.num_targets, 1))
            weighed.backward()
            total += weighed.detach().double()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(total), torch.cat(gradients)


def test_packed_loss_is_unpacked_loss_on_200_random_sets_with_accumulation(model: Decoder) -> None:
    worst_loss, worst_gradient = 0.0, 0.0
    for seed in range(200):
        random = np.random.default_rng(seed)
        batch_size, accumulation = int(random.integers(1, 4)), int(random.integers(1, 5))
        samples = random_samples(random, Batching())
        found = {}
        for packed in (True, False):
            loader = make_loader(
                samples, batch_size=batch_size, max_seq_len=CAPACITY, seed=seed, packed=packed
            )
            found[packed] = mean_loss(model, loader, accumulation)
        (loss, gradient), (expected, expected_gradient) = found[True], found[False]
        worst_loss = max(worst_loss, abs(loss - expected) / max(abs(expected), 1.0))
        norm = max(float(expected_gradient.norm()), 1e-6)
        worst_gradient = max(worst_gradient, float((gradient - expected_gradient).norm()) / norm)
    assert worst_loss < 1e-6
    assert worst_gradient < 1e-5


def test_a_pack_of_three_tokens_gives_the_gradient_of_the_unpadded_row(model: Decoder) -> None:
    """Field case 12: filler attends to nothing, and neither logits nor gradients are NaN."""
    samples = SampleSet(
        tokens_T=np.array([5, 6, 7], np.int32),
        trained_T=np.ones(3, np.uint8),
        lengths_N=np.array([3]),
        rows_N=np.zeros(1, np.uint64),
        report=Report("three", None),
    )
    packed = make_loader(samples, batch_size=1, max_seq_len=64, seed=0)
    alone = make_loader(samples, batch_size=1, max_seq_len=64, seed=0, packed=False)
    (loss, gradient), (expected, wanted) = (mean_loss(model, each, 1) for each in (packed, alone))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
