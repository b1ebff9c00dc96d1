"""The embedding's gradient is made outside autograd and is what autograd would have made.

Shapes: B batch, S tokens, D width, T tokens of the flat batch, V vocabulary.
"""

import pytest
import torch
import torch.nn.functional as F

from solotune.losses import LinearCrossEntropy
from solotune.training import set_dtype

from .tiny import accumulate_gradients, make_batch, take_gradients, tiny


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_gradient_equals_autograds_in_fp32(tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied)
    batches = [make_batch((20, 9), (12,), vocab=17, seed=seed) for seed in range(3)]
    accumulate_gradients(model, batches)
    ours = take_gradients(model)

    num_targets = sum(batch.num_targets for batch in batches)
    for batch in batches:
        x_BSD = F.embedding(batch.tokens_BS, model.embed_tokens.weight)
        context = model.context(batch.positions_BS, batch.segments_BM)
        hidden_BSD = model.hidden_states(x_BSD, context)
        LinearCrossEntropy()(hidden_BSD, model.output_weight, batch, num_targets).backward()
    theirs = take_gradients(model)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_frequent_token_keeps_its_gradient_in_bf16() -> None:
    # 4096 times 0.01: in bf16 the sum stops growing at 2.56, where 0.01 is less than half a step.
    model = set_dtype(tiny(), torch.bfloat16)
    tokens_BS = torch.full((2, 2048), 5)
    grad_BSD = torch.full((2, 2048, 64), 0.01, dtype=torch.bfloat16)
    model.add_embedding_gradient([(tokens_BS, grad_BSD)])
    gradient_VD = model.embed_tokens.weight.grad
    assert gradient_VD is not None
    exact = 4096 * grad_BSD[0, 0, 0].double()
    assert ((gradient_VD[5].double() - exact).abs() <= 2**-8 * exact).all()
    gradient_VD[5] = 0
    assert not gradient_VD.any()


def test_a_schedule_that_does_all_heads_first_gives_the_same_bits() -> None:
    model = set_dtype(tiny(tie_word_embeddings=True), torch.bfloat16)
    batches = [make_batch((30, 11), vocab=9, seed=seed) for seed in range(3)]
    accumulate_gradients(model, batches)
    one_by_one = take_gradients(model)

    loss_fn = LinearCrossEntropy(chunk_tokens=16)
    num_targets = sum(batch.num_targets for batch in batches)
    waiting = []
    for batch in batches:
        x_BSD = model.embed(batch.tokens_BS).requires_grad_()
        context = model.context(batch.positions_BS, batch.segments_BM)
        hidden_BSD = model.hidden_states(x_BSD, context)
        top_BSD = hidden_BSD.detach().requires_grad_()
        loss_fn(top_BSD, model.output_weight, batch, num_targets).backward()
        waiting.append((batch, x_BSD, hidden_BSD, top_BSD))
    for _, _, hidden_BSD, top_BSD in waiting:
        hidden_BSD.backward(top_BSD.grad)
    model.add_embedding_gradient([(batch.tokens_BS, x_BSD.grad) for batch, x_BSD, *_ in waiting])
    torch.testing.assert_close(take_gradients(model), one_by_one, atol=0, rtol=0)


def test_the_head_gradient_is_rounded_in_its_own_memory() -> None:
    model = set_dtype(tiny(tie_word_embeddings=False), torch.bfloat16)
    weight = model.output_weight
    weight.grad_dtype = None
    sum_VD = torch.randn(weight.shape)
    weight.grad = sum_VD.clone()
    storage = weight.grad.untyped_storage().data_ptr()
    model.round_head_gradient()
    assert torch.equal(weight.grad, sum_VD.bfloat16())
    assert weight.grad.untyped_storage().data_ptr() == storage


def test_a_frozen_embedding_gets_no_gradient() -> None:
    model = tiny()
    model.embed_tokens.weight.requires_grad_(False)
    accumulate_gradients(model, [make_batch((8,))])
    assert model.embed_tokens.weight.grad is None
