"""What blocks keep waits for backward on the host or on disk: all of it, and no bit changed.

On CPU source and copy would be equally good, so the source is overwritten (`poison`).
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solotune.data.batch import Batch
from solotune.errors import CheckpointError
from solotune.memory import Disk, HostMemory, checkpoint_blocks
from solotune.memory.streams import CpuQueues, unordered
from solotune.models import Decoder
from solotune.training import set_dtype
from tests.models.tiny import accumulate_gradients, forward, make_batch, take_gradients, tiny

from .allocations import allocated

CPU = torch.device("cpu")
LAYERS = 3


def model_of(
    dtype: torch.dtype = torch.float32, *, checkpointing: bool = True, **fields: Any
) -> Decoder:
    model = set_dtype(tiny(num_hidden_layers=LAYERS, **fields), dtype)
    if checkpointing:
        checkpoint_blocks(model)
    return model


def poisoned(place: str, folder: Path) -> HostMemory:
    disk = Disk(folder) if place == "disk" else None
    return HostMemory(CPU, activations=disk, poison=True)


def leaf(model: Decoder, batch: Batch) -> Tensor:
    return model.embed(batch.tokens_BS).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_gradients_are_bit_equal_though_every_source_is_overwritten(
    dtype: torch.dtype, checkpointing: bool, place: str, tmp_path: Path
) -> None:
    model, batch = model_of(dtype, checkpointing=checkpointing), make_batch((20, 9), (33,))
    loss = accumulate_gradients(model, [batch])
    wanted = take_gradients(model)
    host = poisoned(place, tmp_path)
    assert torch.equal(accumulate_gradients(model, [batch], host=host), loss)
    torch.testing.assert_close(take_gradients(model), wanted, atol=0, rtol=0)


def test_after_the_forward_pass_no_block_input_is_left_to_compute_with() -> None:
    # So the test above can fail: a move that moved nothing would give back these.
    model, batch, inputs = model_of(), make_batch((20,)), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    forward(model, batch, x_BSD=leaf(model, batch), host=HostMemory(CPU, poison=True))
    # The first is the embedded batch: autograd holds it, as its gradient is wanted.
    assert [bool(x_BSD.isnan().all()) for x_BSD in inputs] == [False] + [True] * (LAYERS - 1)


def test_without_checkpointing_blocks_keep_next_to_nothing_on_the_device() -> None:
    model, batch = model_of(checkpointing=False), make_batch((200, 90), (290,))

    def kept(host: HostMemory | None) -> int:
        run = allocated(lambda: forward(model, batch, x_BSD=leaf(model, batch), host=host))
        assert run.result.requires_grad
        return run.left

    host = HostMemory(CPU)  # whose copies are counted too, as it is the same memory
    assert kept(host) - host.bytes_moved < kept(None) / 8


def test_what_is_saved_twice_or_as_a_view_moves_once() -> None:
    model, batch = model_of(checkpointing=False), make_batch((20, 9), (33,))
    host = HostMemory(CPU, poison=True)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x_BSD = leaf(model, batch)
    context = model.context(batch.positions_BS, batch.segments_BM)
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *context.tensors())}
    known.add(x_BSD.untyped_storage().data_ptr())
    hidden_BSD = x_BSD
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        for block in model.blocks:
            hidden_BSD = block(hidden_BSD, context)
    forward(model, batch, x_BSD=leaf(model, batch), host=host)
    assert host.bytes_moved == sum(saved.values())


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_card_would_copy_in_a_safe_order(place: str, checkpointing: bool, tmp_path: Path) -> None:
    model, host = model_of(checkpointing=checkpointing), poisoned(place, tmp_path)
    assert isinstance(host.queues, CpuQueues)
    host.queues.logging = True
    accumulate_gradients(model, [make_batch((20,)), make_batch((30,))], host=host)
    assert len(host.queues.log) > 20
    assert unordered(host.queues.log) == []


def test_nothing_is_left_on_disk_and_files_are_used_again(tmp_path: Path) -> None:
    model, disk = model_of(), Disk(tmp_path)
    host = HostMemory(CPU, activations=disk)
    taken: list[int] = []
    new_file = disk._new_file
    disk._new_file = lambda num_bytes: (taken.append(num_bytes), new_file(num_bytes))[1]
    for _ in range(3):
        accumulate_gradients(model, [make_batch((20,))], host=host)
        assert list(tmp_path.iterdir()) == []
    assert taken == [20 * 64 * 4] * (LAYERS - 1)


def test_a_disk_that_is_full_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("solotune.memory.disk.allocate", full)
    model, batch = model_of(), make_batch((20,))
    host = HostMemory(CPU, activations=Disk(tmp_path))
    with pytest.raises(CheckpointError, match=r"activation_offload_to=disk: .* cannot hold"):
        accumulate_gradients(model, [batch], host=host)
    monkeypatch.undo()
    accumulate_gradients(model, [batch], host=host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_moved_are_those_of_the_block_inputs(dtype: torch.dtype) -> None:
    # So neither a weight nor what all blocks share has moved.
    host = HostMemory(CPU, poison=True)
    model = model_of(dtype, attention_bias=True)
    for batch in (make_batch((20, 9), (33,)), make_batch((12,))):
        before = host.bytes_moved
        accumulate_gradients(model, [batch], host=host)
        block_input = batch.tokens_BS.numel() * 64 * dtype.itemsize
        assert host.bytes_moved - before == (LAYERS - 1) * block_input


def test_weights_and_context_stay_where_autograd_saves_them() -> None:
    # As a compiled block does, and a block without checkpointing.
    model, batch = tiny(num_hidden_layers=LAYERS), make_batch((20, 9), (33,))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    accumulate_gradients(model, [batch])
    wanted = take_gradients(model)
    accumulate_gradients(model, [batch], host=HostMemory(CPU, poison=True))
    torch.testing.assert_close(dict(model.named_parameters()), before, atol=0, rtol=0)
    torch.testing.assert_close(take_gradients(model), wanted, atol=0, rtol=0)


def test_block_inputs_die_during_the_forward_pass() -> None:
    model = model_of()
    inputs = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    batch = make_batch((20,))
    hidden_BSD = forward(model, batch, x_BSD=leaf(model, batch), host=HostMemory(CPU))
    assert hidden_BSD.requires_grad
    # The first is the embedded batch: autograd holds it, as its gradient is wanted.
    assert [ref() for ref in inputs[1:]] == [None] * (LAYERS - 1)


def test_ten_forward_passes_without_backward_leave_nothing_behind() -> None:
    model, batch, host = model_of(), make_batch((20,)), HostMemory(CPU)

    def forward_alone() -> None:
        forward(model, batch, x_BSD=leaf(model, batch), host=host)

    assert [allocated(forward_alone).left for _ in range(10)] == [0] * 10
    assert host.bytes_moved == 10 * (LAYERS - 1) * 20 * 64 * 4


def test_micro_batches_may_be_in_flight_together() -> None:
    model, host = model_of(), HostMemory(CPU, poison=True)
    batches = [make_batch((20,), seed=1), make_batch((30,), seed=2)]

    def gradients(host: HostMemory | None) -> dict[str, Tensor]:
        hidden = [forward(model, each, x_BSD=leaf(model, each), host=host) for each in batches]
        for hidden_BSD in hidden:
            hidden_BSD.square().mean().backward()
        return take_gradients(model)

    torch.testing.assert_close(gradients(host), gradients(None), atol=0, rtol=0)


def test_a_second_backward_says_that_it_needs_a_second_forward() -> None:
    model, batch = model_of(), make_batch((20,))
    hidden_BSD = forward(model, batch, x_BSD=leaf(model, batch), host=HostMemory(CPU))
    loss = hidden_BSD.square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="needed twice: run forward again"):
        loss.backward()


def test_scalars_of_any_dtype_are_read_together() -> None:
    values = (torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(2), torch.tensor(0.25))
    assert HostMemory(CPU).read(*values) == [1.5, 2.0, 0.25]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_on_a_card_gradients_are_bit_equal_and_the_peak_falls_by_the_block_inputs(
    rows: int,
) -> None:
    device = torch.device("cuda")
    layers = 16
    model = set_dtype(tiny(num_hidden_layers=layers), torch.bfloat16).to(device)
    checkpoint_blocks(model)
    batch = make_batch(*[(2000, 48)] * rows).to(device)
    host = HostMemory(device)

    def step(host: HostMemory | None) -> tuple[int, dict[str, Tensor]]:
        torch.cuda.reset_peak_memory_stats()
        accumulate_gradients(model, [batch], host=host)
        return torch.cuda.max_memory_allocated(), take_gradients(model)

    torch.use_deterministic_algorithms(True)
    try:
        step(None)
        plain_peak, wanted = step(None)
        steps = [step(host) for _ in range(3)]  # the second and third with buffers used before
    finally:
        torch.use_deterministic_algorithms(False)
    block_input = rows * 2048 * 64 * 2
    for peak, found in steps:
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)
        assert plain_peak - peak >= (layers - 4) * block_input
