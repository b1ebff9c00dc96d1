"""The tracker's bytes are the allocator's, and each is counted for what it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from solotune.data.batch import Batch
from solotune.memory import Disk, HostMemory, Stepper
from solotune.memory.timeline import CATEGORIES, Timeline
from solotune.memory.tracker import MemoryTracker
from solotune.models.llama import llama
from solotune.optim import AdamWKahan
from solotune.training import set_dtype
from tests.models.tiny import accumulate_gradients, make_batch

from .allocations import allocated
from .one_step import (
    CHECKPOINTING,
    CLIPPED,
    IN_BACKWARD,
    LAYER_MAJOR,
    LAYERS,
    OFFLOADING,
    WIDTH,
    OneStep,
)


def track(one_step: OneStep) -> Timeline:
    """Step twice, the second time tracked: optimizer state is there from the start."""
    one_step()
    tracker = tracker_of(one_step)
    with tracker:
        one_step()
    return tracker.timeline()


def tracker_of(one_step: OneStep) -> MemoryTracker:
    return MemoryTracker(
        one_step.model, loss_fn=one_step.loss_fn, stepper=one_step.stepper, host=one_step.host
    )


def bytes_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("dtype", "on"),
    [
        (torch.float32, {}),
        (torch.float32, {"gradient_accumulation_steps": 2}),
        *((dtype, on) for dtype in (torch.float32, torch.bfloat16) for on in (
            CHECKPOINTING, CHECKPOINTING | {"ac_mode": "selective", "ac_option": "op"},
            OFFLOADING, LAYER_MAJOR, CLIPPED,
        )),
        (torch.float32, IN_BACKWARD),
    ],
    ids=str,
)  # fmt: skip
def test_the_peak_is_the_allocators_within_two_percent(
    dtype: torch.dtype, on: dict[str, Any]
) -> None:
    # Above what was there at the start: what was there would only make the error look smaller.
    one_step = OneStep(dtype=dtype, **on)
    one_step()
    tracker = tracker_of(one_step)

    def tracked() -> None:
        with tracker:
            one_step()

    truth = allocated(tracked)
    total = tracker.timeline().total("device", "host")
    print(f"{dtype} {on}: allocator {truth.peak:,}, tracker {total.max() - total[0]:,}")
    assert total.max() - total[0] == pytest.approx(truth.peak, rel=0.02)
    assert total[-1] - total[0] == truth.left


def test_weights_gradients_and_state_are_counted_to_the_byte() -> None:
    one_step = OneStep(dtype=torch.bfloat16, optimizer=AdamWKahan)
    timeline = track(one_step)
    parameters = list(one_step.model.parameters())
    weights = bytes_of((*parameters, *one_step.model.buffers()))
    assert set(timeline.bytes_E["device", "weights"]) == {weights}
    state = [v for s in one_step.stepper.optimizer.state.values() for v in s.values()]
    state_bytes = bytes_of(value for value in state if isinstance(value, Tensor))
    assert timeline.bytes_E["device", "optimizer state"][0] == state_bytes
    first_of_step = timeline.phases.index("step")
    # The head's is rounded in the memory of its fp32 sum, which is twice as large.
    head = one_step.model.output_weight.nbytes
    assert timeline.bytes_E["device", "gradients"][first_of_step] == bytes_of(parameters) + head
    assert timeline.bytes_E["device", "gradients"][-1] == 0


def test_activations_end_with_the_backward_pass() -> None:
    timeline = track(OneStep())
    activations = timeline.bytes_E["device", "activations"]
    assert activations.max() > 10 * activations[timeline.phases.index("step")]
    checkpointed = track(OneStep(**CHECKPOINTING)).bytes_E["device", "activations"]
    assert checkpointed.max() < activations.max() / 2


def test_logits_are_the_chunk_buffers_of_the_loss() -> None:
    one_step = OneStep()
    buffers = one_step.loss_fn._chunks
    timeline = track(one_step)
    highest = timeline.peak().highest["logits"]
    assert bytes_of(buffers.values()) <= highest < 1.01 * bytes_of(buffers.values())


def test_layer_major_holds_gradients_of_one_block_or_of_the_head() -> None:
    one_step = OneStep(**LAYER_MAJOR)
    gradients = track(one_step).peak().highest["gradients"]
    model = one_step.model
    block, head = bytes_of(model.blocks[0].parameters()), model.output_weight.nbytes
    # The head's from earlier micro-batches, the sum over this one's chunks, and one chunk's.
    assert gradients == max(block, 3 * head + bytes_of(model.norm.parameters()))
    plain = track(OneStep(gradient_accumulation_steps=3)).peak().highest["gradients"]
    assert plain >= bytes_of(model.parameters())


def test_what_waits_on_the_host_is_counted_there_for_what_it_is() -> None:
    one_step = OneStep(**OFFLOADING)
    host = track(one_step).peak("host")
    # But the first, the embedded batch, which autograd holds on the device.
    block_inputs = (LAYERS - 1) * one_step.group[0].tokens_BS.numel() * WIDTH * 4
    assert host.by_category == dict.fromkeys(CATEGORIES, 0) | {"activations": block_inputs}
    clipped = OneStep(**CLIPPED)
    parked = track(clipped).peak("host").highest["gradients"]
    assert parked == bytes_of(clipped.model.parameters())


def test_what_waits_on_disk_is_counted_there(tmp_path: Path) -> None:
    one_step = OneStep(**OFFLOADING)
    one_step.host.activations = Disk(tmp_path)
    disk = track(one_step).peak("disk")
    block_inputs = (LAYERS - 1) * one_step.group[0].tokens_BS.numel() * WIDTH * 4
    assert disk.by_category == dict.fromkeys(CATEGORIES, 0) | {"activations": block_inputs}


@pytest.mark.parametrize("place", ["host", "disk"])
def test_state_that_lives_elsewhere_is_counted_there(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "state" if place == "disk" else None
    one_step = OneStep(folder=folder, optimizer_state=place)
    timeline = track(one_step)
    home = one_step.stepper.home
    assert home is not None
    assert timeline.bytes_E[place, "optimizer state"][0] >= home.num_bytes > 0
    assert timeline.bytes_E["device", "optimizer state"][0] < home.num_bytes / 50
    one_step.stepper.close()


def test_the_parts_of_a_subclass_count_and_its_shell_does_not() -> None:
    one_step = OneStep()
    parameter = one_step.model.norm.weight
    assert isinstance(parameter, nn.Parameter)
    before = track(one_step).bytes_E["device", "optimizer state"][0]
    parts = torch.ones(500), torch.ones(500)
    one_step.stepper.optimizer.state[parameter]["extra"] = TwoTensor(*parts)
    tracker = tracker_of(one_step)
    with tracker:
        pass
    assert tracker.timeline().bytes_E["device", "optimizer state"][0] == before + bytes_of(parts)


def test_storages_count_once_and_until_the_last_view_ends() -> None:
    tracker = tracker_of(OneStep())
    with tracker:
        tensor = torch.zeros(1000)
        view = tensor.view(10, 100)[2:]
        del tensor
        (view + 0).sum()
        held = torch.zeros(1)
        del view
    total = tracker.timeline().total("device")
    assert total.max() - total[0] == 4000 + 2 * 3200 - 3200 + 4
    assert total[-1] - total[0] == held.nbytes


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, AdamWKahan])
@pytest.mark.parametrize("on", [CHECKPOINTING, IN_BACKWARD, CLIPPED], ids=str)
def test_a_tracked_step_is_bit_equal(on: dict[str, Any], optimizer: Any) -> None:
    one, other = (OneStep(dtype=torch.bfloat16, optimizer=optimizer, **on) for _ in range(2))
    track(one)
    other()
    other()
    for tracked, untracked in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(tracked, untracked)


def test_after_an_exception_nothing_of_the_tracker_is_left() -> None:
    one_step = OneStep()
    with pytest.raises(RuntimeError, match="planted"), tracker_of(one_step):
        raise RuntimeError("planted")
    assert "step" not in vars(one_step.stepper)
    assert "take_buffer" not in vars(one_step.host)
    modules = (*one_step.model.modules(), one_step.loss_fn)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_fake_tensors_show_the_real_peak_without_the_memory() -> None:
    # They do not run the attention's kernel, so its own temporaries are missing.
    real = OneStep(optimizer_state="device")

    def forward_backward(model, batch: Batch) -> Timeline:
        stepper = Stepper(torch.optim.SGD(model.parameters()))
        loss_fn = real.loss_fn  # takes no part: accumulate_gradients has its own
        host = HostMemory(torch.device("cpu"))
        tracker = MemoryTracker(model, loss_fn=loss_fn, stepper=stepper, host=host)
        with tracker:
            accumulate_gradients(model, [batch])
        return tracker.timeline()

    batch = make_batch((100, 60, 30), (150, 20), vocab=1000)
    expected = forward_backward(real.model, batch).peak()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = set_dtype(llama(real.model.config), torch.float32)
        found = forward_backward(fake, batch).peak()
    assert found.by_category["weights"] == expected.by_category["weights"]
    assert found.by_category["gradients"] == expected.by_category["gradients"]
    assert found.num_bytes == pytest.approx(expected.num_bytes, rel=0.02)


def test_compiled_code_runs_uncompiled_while_it_is_tracked_and_compiled_after() -> None:
    calls: list[str] = []

    def backend(graph, inputs):
        def run(*args: Tensor):
            calls.append("compiled")
            return graph(*args)

        return run

    double = torch.compile(lambda x: x * 2, backend=backend)
    double(torch.ones(3))
    with tracker_of(OneStep()):
        double(torch.ones(3))
    assert calls == ["compiled"]
    double(torch.ones(3))
    assert calls == ["compiled"] * 2
