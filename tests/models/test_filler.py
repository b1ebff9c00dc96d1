"""Filler: positions that belong to no sample change no number of those that do.

Shapes: B batch, S tokens, D width, V vocabulary.
"""

from dataclasses import replace

import pytest
import torch

from solotune.data.batch import Batch
from solotune.training import set_dtype

from .tiny import accumulate_gradients, logits, make_batch, real_rows, take_gradients, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_tokens_in_a_pack_of_64_train_as_if_alone(dtype: torch.dtype) -> None:
    model = set_dtype(tiny(), dtype)
    alone, filled = make_batch((3,)), make_batch((3,), row_length=64)
    assert torch.equal(filled.tokens_BS[:, :3], alone.tokens_BS)
    logits_BSV = logits(model, filled)
    assert logits_BSV.isfinite().all()
    torch.testing.assert_close(logits_BSV[:, :3], logits(model, alone))

    accumulate_gradients(model, [alone])
    wanted = take_gradients(model)
    accumulate_gradients(model, [filled])
    for name, gradient in take_gradients(model).items():
        assert gradient.isfinite().all(), name
        distance = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert distance <= (1e-5 if dtype == torch.float32 else 1e-2), name


def left_filled(batch: Batch, filler: int) -> Batch:
    """Return a one-row batch with `filler` positions in front, as a segment without a target."""
    tokens_BS = torch.cat((torch.zeros(1, filler, dtype=torch.int64), batch.tokens_BS), 1)
    return replace(
        batch,
        tokens_BS=tokens_BS,
        positions_BS=torch.cat((torch.arange(filler).unsqueeze(0), batch.positions_BS), 1),
        segments_BM=torch.tensor([[filler, batch.num_tokens]], dtype=torch.int32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_1_and_6_are_finite_and_equal_the_unpadded_run(dtype: torch.dtype) -> None:
    model = set_dtype(tiny(), dtype)
    batch = make_batch((1,), (6,))
    short, long = make_batch((1,)), make_batch((6,), seed=3)
    batch.tokens_BS[0, :1], batch.tokens_BS[1] = short.tokens_BS[0], long.tokens_BS[0]
    together_BSV = logits(model, batch)
    assert together_BSV.isfinite().all()
    torch.testing.assert_close(together_BSV[0, :1], logits(model, short)[0])
    torch.testing.assert_close(together_BSV[1], logits(model, long)[0])
    left_BSV = logits(model, left_filled(short, 5))
    assert left_BSV.isfinite().all()
    torch.testing.assert_close(left_BSV[0, 5:], logits(model, short)[0])


def test_what_the_filler_holds_changes_nothing() -> None:
    model = tiny()
    batch = make_batch((9, 4), (20,), row_length=32)
    real_BS = real_rows(batch)
    before = logits(model, batch)[real_BS]
    accumulate_gradients(model, [batch])
    wanted = take_gradients(model)
    other = replace(batch, tokens_BS=batch.tokens_BS.masked_fill(~real_BS, 77))
    assert torch.equal(logits(model, other)[real_BS], before)
    accumulate_gradients(model, [other])
    torch.testing.assert_close(take_gradients(model), wanted, atol=0, rtol=0)


def test_a_row_without_any_segment_is_finite_and_has_no_gradient() -> None:
    model = tiny()
    batch = make_batch((12,), (8,))
    empty = replace(
        batch,
        segments_BM=torch.tensor([[12], [0]], dtype=torch.int32),
        labels_BS=batch.labels_BS.index_fill(0, torch.tensor(1), -100),
        target_rows_T=batch.target_rows_T[:11],
        num_targets=11,
    )
    assert logits(model, empty).isfinite().all()
    accumulate_gradients(model, [empty])
    found = take_gradients(model)
    accumulate_gradients(model, [make_batch((12,))])
    torch.testing.assert_close(found, take_gradients(model))
