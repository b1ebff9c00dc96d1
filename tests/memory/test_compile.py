"""Compiled blocks: same names, one compilation for all batches of a shape, reordered gradients."""

import pytest
import torch
from torch import Tensor

from solotune.memory import HostMemory, checkpoint_blocks, compile_blocks
from solotune.models import Decoder
from tests.models.tiny import accumulate_gradients, make_batch, take_gradients, tiny


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(**fields) -> tuple[Decoder, Decoder]:
    """Return a model and its compiled twin, both checkpointed."""
    plain, compiled = (tiny(num_hidden_layers=3, **fields) for _ in range(2))
    for model in (plain, compiled):
        checkpoint_blocks(model)
    compile_blocks(compiled)
    return plain, compiled


def relative_l2(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    ours, theirs = (torch.cat([g[n].flatten() for n in wanted]) for g in (found, wanted))
    return float((ours - theirs).norm() / theirs.norm())


def test_parameter_names_do_not_change() -> None:
    plain, compiled = pair()
    assert list(dict(compiled.named_parameters())) == list(dict(plain.named_parameters()))
    assert compiled.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.slow
def test_gradients_are_reordered_and_no_batch_of_a_shape_compiles_again() -> None:
    plain, compiled = pair(attention_bias=True)
    # The same shape (two rows, 40 positions, at most 3 segments), and ever other segments.
    batches = [
        make_batch(*rows, row_length=40, seed=seed)
        for seed, rows in enumerate(
            [((20, 9, 4), (33,)), ((38,), (1, 2, 37)), ((13, 13, 13), (39, 1)), ((5,), (6, 7, 8))]
        )
    ]
    torch._dynamo.utils.counters.clear()
    found = []
    for number, batch in enumerate(batches):
        accumulate_gradients(plain, [batch])
        wanted = take_gradients(plain)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            accumulate_gradients(compiled, [batch])
        found.append(take_gradients(compiled))
        assert relative_l2(found[-1], wanted) <= 1e-4
    # All blocks share one graph, the recomputation inside it.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    # Offloading moves the compiled block's input and neither its weights nor the angles.
    host = HostMemory(torch.device("cpu"), poison=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        accumulate_gradients(compiled, batches[-1:], host=host)
    assert host.bytes_moved == 2 * (2 * 40 * 64) * 4  # the first is the embedded batch
    torch.testing.assert_close(take_gradients(compiled), found[-1], atol=0, rtol=0)
