"""Dropout is keyed by micro-batch and layer, and keeps no mask."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from solotune.adapters import LoRA, adapter_parameters, initialize, inject
from solotune.adapters.lora_dropout import drop, drop_and_project, layer_key
from solotune.memory import checkpoint_blocks, compile_blocks
from solotune.models import Decoder
from tests.models.tiny import accumulate_gradients, make_batch, take_gradients, tiny

KEY, Q, K = torch.tensor(5), layer_key("q_proj"), layer_key("k_proj")


def adapted(**settings) -> Decoder:
    model = tiny()
    inject(model, LoRA(**({"rank": 4, "targets": ["all-linear", "lm_head"]} | settings)))
    initialize(model, seed=1)
    for name, parameter in adapter_parameters(model).items():
        if name.endswith("lora_B.weight"):
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return model


def test_a_share_is_dropped_and_the_mean_stays() -> None:
    x = torch.ones(1000, 100)
    dropped = drop(x, KEY, Q, 0.3)
    assert abs(float((dropped == 0).float().mean()) - 0.3) < 0.01
    torch.testing.assert_close(dropped[dropped != 0], x[dropped != 0] / 0.7)
    assert torch.equal(dropped, drop(x, KEY, Q, 0.3))
    for other in (drop(x, torch.tensor(6), Q, 0.3), drop(x, KEY, K, 0.3)):
        assert 0.35 < float((dropped != other).float().mean()) < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_numbers_that_were_left(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 10, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3, 10, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(3, 6, generator=generator).to(dtype).T  # as strides of a gradient may be
    drop_and_project(x, weight, KEY, Q, 0.5).backward(grad)
    mask = drop(torch.ones(6, 10, dtype=dtype), KEY, Q, 0.5)
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(x.grad, (grad @ weight.detach()) * mask)
    torch.testing.assert_close(weight.grad, grad.T @ (x.detach() * mask))


@pytest.mark.parametrize("dora", [False, True])
def test_recomputation_and_order_give_the_same_gradients_bit_for_bit(dora: bool) -> None:
    batches = [replace(make_batch((9, 5), seed=seed), key=seed) for seed in (1, 2)]
    targets = ["all-linear"] if dora else ["all-linear", "lm_head"]
    model = adapted(dropout=0.2, dora=dora, targets=targets)
    accumulate_gradients(model, batches)
    plain = take_gradients(model)
    checkpoint_blocks(model)
    accumulate_gradients(model, batches)
    assert all(torch.equal(g, plain[name]) for name, g in take_gradients(model).items())
    keyless = [replace(batch, key=None) for batch in batches]
    accumulate_gradients(model, keyless)
    assert not any(torch.equal(g, plain[name]) for name, g in take_gradients(model).items())


def test_compiled_blocks_drop_the_same_and_share_one_graph() -> None:
    """Whatever the block and the micro-batch, nothing is compiled anew."""
    counters.clear()
    plain, compiled = adapted(dropout=0.3), adapted(dropout=0.3)
    compile_blocks(compiled)
    for key in (1, 2):
        batch = replace(make_batch((9, 5)), key=key)
        for model in (plain, compiled):
            accumulate_gradients(model, [batch])
        wanted = take_gradients(plain)
        for name, gradient in take_gradients(compiled).items():
            torch.testing.assert_close(gradient, wanted[name], atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_dropout_saves_nothing_beside_the_input_of_the_layer() -> None:
    def saved_bytes(key: int | None) -> int:
        model, batch = adapted(dropout=0.2), make_batch((40, 24))
        context = model.context(batch.positions_BS, batch.segments_BM, key=key)
        x_BSD, stored = model.embed(batch.tokens_BS).requires_grad_(), {}

        def pack(tensor: Tensor) -> Tensor:
            stored[tensor.untyped_storage().data_ptr()] = tensor  # alive: no address comes twice
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model.hidden_states(x_BSD, context)
        return sum(tensor.untyped_storage().nbytes() for tensor in stored.values())

    without, keys = saved_bytes(None), 16 * 8
    assert without < saved_bytes(7) <= without + keys
