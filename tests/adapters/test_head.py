"""An adapted output layer: the loss adds it chunk by chunk, and never makes the sum.

Shapes: V vocabulary.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from solotune.adapters import LoRA, adapter_parameters, initialize, inject
from solotune.losses import LinearCrossEntropy
from solotune.models import Decoder
from tests.models.tiny import forward, make_batch, take_gradients, tiny


def adapted(*, dora: bool, tied: bool) -> Decoder:
    model = tiny(tie_word_embeddings=tied)
    inject(model, LoRA(rank=4, targets=["lm_head", "down_proj"], dora=dora))
    initialize(model, seed=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter_parameters(model).values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_loss_and_gradients_are_those_of_whole_logits(dora, tied, chunk_tokens) -> None:
    model, batch = adapted(dora=dora, tied=tied), make_batch((20, 11), (31,))
    loss = LinearCrossEntropy(chunk_tokens=chunk_tokens)(
        forward(model, batch), model.head, batch, batch.num_targets
    )
    loss.backward()
    chunked = take_gradients(model)
    logits_BSV = model.logits(forward(model, batch))
    whole = F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten())
    whole.backward()
    torch.testing.assert_close(loss, whole, atol=1e-5, rtol=0)
    for name, gradient in take_gradients(model).items():
        torch.testing.assert_close(chunked[name], gradient, atol=2e-6, rtol=1e-4)
    assert any("lm_head" in name for name in chunked)


@pytest.mark.parametrize("dora", [False, True])
def test_a_step_makes_no_second_output_weight(dora: bool) -> None:
    model, batch = adapted(dora=dora, tied=True), make_batch((20, 11))
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made = result if isinstance(result, tuple | list) else [result]
            known = model.output_weight.untyped_storage().data_ptr()
            sizes.extend(
                t.numel()
                for t in made
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() != known
            )
            return result

    with Sizes():
        loss_fn = LinearCrossEntropy(chunk_tokens=8)
        loss_fn(forward(model, batch), model.head, batch, batch.num_targets).backward()
    assert max(sizes) < model.output_weight.numel()


def test_validation_drops_nothing() -> None:
    model, batch = tiny(), make_batch((20, 11))
    inject(model, LoRA(rank=4, targets=["lm_head"], dropout=0.5))
    initialize(model, seed=1)
    for parameter in adapter_parameters(model).values():
        parameter.data += 0.1
    loss_fn, keyed = LinearCrossEntropy(), replace(batch, key=3)
    with torch.no_grad():
        hidden_BSD = forward(model, batch)
        losses = [loss_fn(hidden_BSD, model.head, b, b.num_targets) for b in (batch, keyed)]
    assert torch.equal(*losses)
    dropped = loss_fn(hidden_BSD, model.head, keyed, keyed.num_targets)
    assert not torch.equal(dropped, losses[0])
