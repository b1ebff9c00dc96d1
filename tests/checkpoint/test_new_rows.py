"""Rows for added tokens: their values, and that nothing else moves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from solotune.checkpoint import load_weights
from solotune.errors import CheckpointError

from .conftest import CONFIG, build

Make = Callable[..., Path]
ROWS = CONFIG["vocab_size"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_of_the_old_ones(
    make_folder: Make, tied: bool, dtype: torch.dtype
) -> None:
    folder = make_folder(tie_word_embeddings=tied)
    plain, model = build(folder, dtype=dtype), build(folder, dtype=dtype)
    load_weights(plain, folder, device="cpu")
    model.add_tokens((ROWS, ROWS + 1), rows=ROWS + 2)
    report = load_weights(model, folder, device="cpu")
    assert any("2 rows of the embedding begin as the mean" in line for line in report.lines())
    expected, found = dict(plain.named_parameters()), dict(model.named_parameters())
    grown = {name for name in found if found[name].shape != expected[name].shape}
    assert grown == {"embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    for name, tensor in found.items():
        assert torch.equal(tensor[: len(expected[name])], expected[name])
    for name in grown:
        mean_D = expected[name].double().mean(0)
        torch.testing.assert_close(
            found[name][ROWS:].double(), mean_D.expand(2, -1), rtol=4e-3, atol=1e-6
        )
        assert torch.equal(found[name][ROWS], expected[name].float().mean(0).to(dtype))


def test_rows_of_padding_are_used_first(make_folder: Make) -> None:
    folder = make_folder(tie_word_embeddings=True)
    plain, model = build(folder, dtype=torch.float32), build(folder, dtype=torch.float32)
    load_weights(plain, folder, device="cpu")
    model.add_tokens((310, 311), rows=312)
    load_weights(model, folder, device="cpu")
    old, new = plain.embed_tokens.weight, model.embed_tokens.weight
    assert (new.shape, model.config["vocab_size"]) == (old.shape, ROWS)
    assert torch.equal(new[:310], old[:310])
    assert torch.equal(new[312:], old[312:])
    torch.testing.assert_close(new[310:312], old[:310].mean(0).expand(2, -1))


def test_new_rows_that_are_not_trained_are_told(make_folder: Make) -> None:
    folder = make_folder(tie_word_embeddings=False)
    model = build(folder)
    model.requires_grad_(False)
    model.add_tokens((ROWS,), rows=ROWS + 1)
    lines = load_weights(model, folder, device="cpu").lines()
    assert lines[-1].endswith("the mean of the others and stay so: trainable leaves it out")


def test_a_resumed_run_keeps_the_rows_that_it_trained(make_folder: Make) -> None:
    folder = make_folder(tie_word_embeddings=False)
    model, plain = build(folder, dtype=torch.float32), build(folder, dtype=torch.float32)
    model.add_tokens((310,), rows=311)
    load_weights(model, folder, device="cpu", fill_new_rows=False)
    load_weights(plain, folder, device="cpu")
    assert torch.equal(model.embed_tokens.weight, plain.embed_tokens.weight)


def test_rows_that_nobody_asked_for_are_still_refused(make_folder: Make) -> None:
    folder = make_folder(tie_word_embeddings=False)
    model = build(folder, dtype=torch.float32)
    model.add_tokens((), rows=ROWS + 1)
    with pytest.raises(CheckpointError, match=r"has the shape \[320, 64\]"):
        load_weights(model, folder, device="cpu", fill_new_rows=False)
