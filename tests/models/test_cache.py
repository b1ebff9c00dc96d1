"""Decoding with the key/value cache equals the full forward pass.

Shapes: B batch, S tokens, V vocabulary.
"""

import pytest
import torch
from torch import Tensor

from solotune.models import Decoder, KVCache

from .families import tiny_family
from .tiny import logits, make_batch, tiny


@torch.no_grad()
def decode(
    model: Decoder,
    cache: KVCache,
    tokens_BS: Tensor,
    positions_BS: Tensor,
    segments_BM: Tensor | None = None,
) -> Tensor:
    context = model.context(positions_BS, segments_BM, cache)
    return model.logits(model.hidden_states(model.embed(tokens_BS), context))


@pytest.mark.parametrize("pieces", [(24,), (5, 1, 18), (1,) * 24])
def test_any_way_to_cut_a_sequence_gives_the_logits_of_the_whole(pieces: tuple[int, ...]) -> None:
    model, batch = tiny(num_hidden_layers=3), make_batch((24,))
    cache = model.new_cache(1, 24)
    found = [
        decode(model, cache, tokens_BS, positions_BS)
        for tokens_BS, positions_BS in zip(
            batch.tokens_BS.split(pieces, 1), batch.positions_BS.split(pieces, 1), strict=True
        )
    ]
    torch.testing.assert_close(torch.cat(found, 1), logits(model, batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize("prompt_by_segments", [True, False])
@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "plain"), ("mistral", "a window"), ("gemma2", "low caps"), ("gemma3_text", "plain")],
)
def test_rows_of_different_length_decode_as_if_alone(
    family: str, name: str, prompt_by_segments: bool
) -> None:
    # As `generate` does: short prompts have filler behind, and go on at their own next position.
    # Windows are of 8 tokens.
    model = tiny_family(family, name)
    lengths, new = (3, 9, 6), 5
    rows = [make_batch((length + new,), seed=length) for length in lengths]
    whole = [logits(model, row)[0] for row in rows]
    tokens = [row.tokens_BS[0] for row in rows]
    prompts_BS = torch.full((3, 9), 7)
    for row, length in enumerate(lengths):
        prompts_BS[row, :length] = tokens[row][:length]

    cache = model.new_cache(3, 9 + new)
    segments_BM = torch.tensor(lengths, dtype=torch.int32).unsqueeze(1)
    first_BSV = decode(
        model,
        cache,
        prompts_BS,
        torch.arange(9).expand(3, -1),
        segments_BM if prompt_by_segments else None,
    )
    for row, length in enumerate(lengths):
        torch.testing.assert_close(first_BSV[row, :length], whole[row][:length], atol=1e-5, rtol=0)
    for step in range(new):
        at = [length + step for length in lengths]
        next_BS = torch.stack([t[position] for t, position in zip(tokens, at, strict=True)])
        next_BSV = decode(model, cache, next_BS.unsqueeze(1), torch.tensor(at).unsqueeze(1))
        for row, position in enumerate(at):
            torch.testing.assert_close(next_BSV[row, 0], whole[row][position], atol=1e-5, rtol=0)
