"""Activation checkpointing changes no bit and keeps one block input a block.

Shapes: B batch, S tokens, D width.
"""

from typing import Literal

import pytest
import torch

from solotune.memory import checkpoint_blocks
from solotune.training import set_dtype
from tests.models.tiny import accumulate_gradients, make_batch, take_gradients, tiny

from .allocations import Allocated, allocated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option", [None, 2, "op"])
def test_loss_and_gradients_are_bit_equal(
    dtype: torch.dtype, option: int | Literal["op"] | None
) -> None:
    model = set_dtype(tiny(num_hidden_layers=3, tie_word_embeddings=True), dtype)
    batches = [make_batch((20, 9), (30,), seed=1), make_batch((12,), seed=2)]
    loss = accumulate_gradients(model, batches)
    wanted = take_gradients(model)
    checkpoint_blocks(model, option=option)
    assert torch.equal(accumulate_gradients(model, batches), loss)
    torch.testing.assert_close(take_gradients(model), wanted, atol=0, rtol=0)


def test_parameter_names_do_not_change() -> None:
    model = tiny()
    names = [name for name, _ in model.named_parameters()]
    checkpoint_blocks(model)
    assert [name for name, _ in model.named_parameters()] == names


BATCH, TOKENS, WIDTH = 2, 100, 64
BLOCK_INPUT = BATCH * TOKENS * WIDTH * 4  # bytes


def forward_pass(layers: int, *, checkpointing: bool) -> Allocated:
    model = tiny(num_hidden_layers=layers)
    if checkpointing:
        checkpoint_blocks(model)
    batch = make_batch((TOKENS,), (TOKENS,))
    x_BSD = model.embed(batch.tokens_BS).requires_grad_()
    context = model.context(batch.positions_BS, batch.segments_BM)
    return allocated(lambda: model.hidden_states(x_BSD, context))


def test_a_forward_pass_leaves_one_block_input_a_block_alive() -> None:
    def bytes_a_block(*, checkpointing: bool) -> int:
        fewer, more = (forward_pass(n, checkpointing=checkpointing).left for n in (2, 5))
        return (more - fewer) // 3

    without, with_it = bytes_a_block(checkpointing=False), bytes_a_block(checkpointing=True)
    print(f"bytes a block: {without:,} without checkpointing, {with_it:,} with")
    assert with_it == BLOCK_INPUT
    assert without > 10 * BLOCK_INPUT


def test_backward_adds_the_activations_of_one_block_at_a_time() -> None:
    def peak(layers: int) -> int:
        model = tiny(num_hidden_layers=layers)
        checkpoint_blocks(model)
        batch = make_batch((TOKENS,), (TOKENS,))
        return allocated(lambda: accumulate_gradients(model, [batch])).peak

    block_gradients = sum(p.nbytes for p in tiny().layers[0].parameters())
    assert peak(6) - peak(2) <= 4 * (BLOCK_INPUT + block_gradients)


def test_without_gradients_nothing_is_kept() -> None:
    model = tiny(num_hidden_layers=4)
    checkpoint_blocks(model)
    batch = make_batch((TOKENS,), (TOKENS,))
    x_BSD = model.embed(batch.tokens_BS)
    context = model.context(batch.positions_BS, batch.segments_BM)
    with torch.no_grad():
        assert allocated(lambda: model.hidden_states(x_BSD, context)).left == BLOCK_INPUT
