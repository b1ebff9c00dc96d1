"""Streamed layers: the same bits, two blocks' weights on the device, and copies in order."""

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import bitsandbytes.optim
import pytest
import torch
from torch import Tensor, nn

from solotune.adapters import LoRA, adapter_parameters, inject
from solotune.checkpoint.load import load_weights
from solotune.errors import ConfigError
from solotune.memory import (
    HostMemory,
    Stepper,
    StreamedLayers,
    check_memory_keys,
    compile_blocks,
    is_layer_major,
)
from solotune.memory.host import Ring, RingBuffer
from solotune.memory.streams import COPY, HOST, CpuQueues, Mark, unordered
from solotune.memory.tracker import MemoryTracker
from solotune.models import Decoder
from solotune.optim import AdamWKahan, LionKahan
from solotune.training import UpdateGauge, freeze, set_seed

from .one_step import LAYER_MAJOR, LAYERS, NOTHING_ON, OneStep

CPU = torch.device("cpu")
STREAMED: dict[str, Any] = LAYER_MAJOR | {"resident_layers": 0}
BNB: Any = bitsandbytes.optim


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() > 1]


def bytes_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def with_layers(resident: int | None, **keys: Any) -> OneStep:
    """Return a step in the layer-major schedule, poisoned; `keys` win."""
    return OneStep(**{"poison": True, **LAYER_MAJOR, "resident_layers": resident, **keys})


def weights_after(one_step: OneStep, steps: int = 3) -> dict[str, Tensor]:
    for _ in range(steps):
        one_step()
    one_step.host.settle()
    one_step.stepper.settle()
    return {name: p.detach().clone() for name, p in one_step.model.named_parameters()}


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [name for name, weight in first.items() if not torch.equal(weight, second[name])]


@pytest.mark.parametrize(("resident", "tied"), [(0, True), (0, False), (1, True), (3, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("clip", "count"), [(None, 1), (None, 3), (0.5, 3)])
def test_streamed_layers_train_to_the_same_bits(resident, tied, dtype, clip, count) -> None:
    keys: dict[str, Any] = {"dtype": dtype, "optimizer": AdamWKahan, "rows": ((30, 20), (40,))}
    keys |= {"shape": {"tie_word_embeddings": tied}}
    keys |= {"clip_grad_norm": clip, "gradient_accumulation_steps": count}
    plain, streamed = with_layers(None, **keys), with_layers(resident, **keys)
    assert differing(weights_after(plain), weights_after(streamed)) == []
    assert all(p.grad is None for p in streamed.model.parameters())


@pytest.mark.parametrize(
    ("optimizer", "where"),
    [
        (torch.optim.AdamW, "host"),
        (torch.optim.AdamW, "disk"),
        (LionKahan, "host"),
        (BNB.AdamW8bit, "device"),
        (BNB.AdamW8bit, "disk"),
        (BNB.Lion8bit, "host"),
    ],
    ids=str,
)
def test_every_optimizer_steps_streamed_weights_with_its_state_anywhere(
    optimizer, where, tmp_path
) -> None:
    keys: dict[str, Any] = {"dtype": torch.bfloat16, "optimizer": optimizer, "rows": ((40, 30),)}
    keys |= {"gradient_accumulation_steps": 1}
    folder = tmp_path / "state" if where == "disk" else None
    plain = with_layers(None, **keys)
    streamed = with_layers(0, **keys, folder=folder, optimizer_state=where)
    assert differing(weights_after(plain), weights_after(streamed)) == []
    streamed.stepper.close()


def test_torchaos_optimizer_steps_streamed_weights() -> None:
    adam = pytest.importorskip("torchao.optim").AdamW8bit
    keys: dict[str, Any] = {"dtype": torch.bfloat16, "optimizer": adam, "rows": ((40, 30),)}
    with torch.compiler.set_stance("force_eager"):
        plain = weights_after(with_layers(None, **keys))
        streamed = weights_after(with_layers(0, **keys))
    assert differing(plain, streamed) == []


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("trainable", ["layers.2|lm_head", "layers.[13].mlp", "norm"])
def test_where_some_weights_are_frozen_the_others_train_to_the_same_bits(trainable, clip) -> None:
    finals = []
    for resident in (None, 1):
        one_step = with_layers(resident, rows=((40, 30),), clip_grad_norm=clip)
        freeze(one_step.model, trainable=trainable)
        layers = StreamedLayers(one_step.model, resident=resident)  # after freezing, as in a recipe
        one_step.host = HostMemory(CPU, weights=layers, poison=True)
        finals.append(weights_after(one_step))
    assert differing(*finals) == []


def counted(host: HostMemory) -> Counter[str]:
    """Return what will hold the bytes that go to the device and home."""
    moved: Counter[str] = Counter()
    if not (isinstance(host.weights, StreamedLayers) and host.weights._slots):
        return moved
    ring = host.weights._ring
    send, receive = ring.send, ring.receive

    def sent(buffer: RingBuffer, target: Tensor) -> Any:
        moved["to device"] += target.nbytes
        return send(buffer, target)

    def received(source: Tensor, homes: Any, views: Any) -> Any:
        moved["home"] += source.nbytes
        return receive(source, homes, views)

    ring.send, ring.receive = sent, received
    return moved


@pytest.mark.parametrize("resident", [0, 2])
def test_what_a_step_moves_is_two_visits_of_each_streamed_block_and_one_way_home(resident) -> None:
    one_step = with_layers(resident)
    moved = counted(one_step.host)
    one_step()
    block, streamed = bytes_of(matrices(one_step.model.blocks[0])), LAYERS - resident
    # At the turn from forward to backward the upper two are there already.
    assert moved == {"to device": (2 * streamed - 2) * block, "home": streamed * block}


def test_clipping_needs_one_visit_more_and_forward_visits_bring_nothing_home() -> None:
    one_step = with_layers(0, clip_grad_norm=1.0)
    moved = counted(one_step.host)
    one_step()
    block = bytes_of(matrices(one_step.model.blocks[0]))
    assert moved == {"to device": (3 * LAYERS - 2) * block, "home": LAYERS * block}


def test_what_is_frozen_never_goes_home() -> None:
    one_step = with_layers(0)
    freeze(one_step.model, trainable="layers.3.mlp")
    one_step.host = HostMemory(CPU, weights=StreamedLayers(one_step.model, resident=0))
    moved = counted(one_step.host)
    one_step()
    assert moved["home"] == bytes_of(matrices(one_step.model.blocks.get_submodule("3.mlp")))
    block = bytes_of(matrices(one_step.model.blocks[0]))
    assert moved["to device"] == LAYERS * block  # backward ends in the block that is there


def test_a_block_computes_with_weights_in_one_of_two_slots_and_rests_with_those_at_home() -> None:
    one_step = with_layers(0)
    homes = [[p.data_ptr() for p in matrices(block)] for block in one_step.model.blocks]
    seen: list[set[int]] = []

    def note(block: nn.Module, args: Any) -> None:
        seen.append({p.untyped_storage().data_ptr() for p in matrices(block)})

    for block in one_step.model.blocks:
        block.register_forward_pre_hook(note)
    for _ in range(3):
        one_step()
    assert all(len(storages) == 1 for storages in seen)
    assert len(set.union(*seen)) == 2, "no memory is allocated for a visit"
    at_rest = [[p.data_ptr() for p in matrices(block)] for block in one_step.model.blocks]
    assert at_rest == homes


def test_weights_on_the_device_are_the_resident_ones_and_two_slots() -> None:
    one_step = with_layers(1)
    one_step()
    tracker = MemoryTracker(
        one_step.model, loss_fn=one_step.loss_fn, stepper=one_step.stepper, host=one_step.host
    )
    with tracker:
        one_step()
    timeline = tracker.timeline()
    model = one_step.model
    block = bytes_of(matrices(model.blocks[0]))
    whole = bytes_of((*model.parameters(), *model.buffers()))
    device, host = (timeline.bytes_E[place, "weights"] for place in ("device", "host"))
    assert set(device) == {whole - 3 * block + 2 * block}
    assert set(host) == {3 * block + 3 * block}  # homes and the ring


class WithoutWait(CpuQueues):
    """Forgets to let the computation wait for a copy."""

    def wait(self, event: int) -> None:
        pass


class CopyTooEarly(CpuQueues):
    """Forgets to let a copy wait for what is computed before it."""

    def copy(self, target: Tensor, source: Tensor, *, after: int | None = None) -> int:
        done = super().copy(target, source, after=after)
        waits = [
            index
            for index, entry in enumerate(self.log)
            if isinstance(entry, Mark) and (entry.queue, entry.kind) == (COPY, "wait")
        ]
        del self.log[waits[-1 if after is None else -2]]
        return done


class ThreadTooEarly(CpuQueues):
    """Forgets to let the thread wait for a copy before it uses the buffer."""

    def synchronize(self, event: int) -> None:
        pass


class CopyBeforeThread(CpuQueues):
    """Forgets to let a copy wait for the thread."""

    def copy(self, target: Tensor, source: Tensor, *, after: int | None = None) -> int:
        return super().copy(target, source)


def log_of(queues: CpuQueues, *, resident: int = 0, clip: float | None = None) -> CpuQueues:
    one_step = with_layers(resident, rows=((30, 20),), clip_grad_norm=clip)
    layers = StreamedLayers(one_step.model, resident=resident)
    one_step.host = HostMemory(CPU, weights=layers)
    one_step.host.queues = layers._ring._queues = queues
    queues.logging = True
    for _ in range(2):
        one_step()
    one_step.host.settle()
    return queues


@pytest.mark.parametrize(("resident", "clip"), [(0, None), (0, 1.0), (1, None), (2, 1.0), (3, 1.0)])
def test_two_steps_of_streamed_layers_are_ordered(resident: int, clip: float | None) -> None:
    log = log_of(CpuQueues(), resident=resident, clip=clip).log
    assert sum(getattr(entry, "queue", None) == HOST for entry in log) > 4, "nothing was staged"
    assert unordered(log) == []


@pytest.mark.parametrize("broken", [WithoutWait, CopyTooEarly, ThreadTooEarly, CopyBeforeThread])
def test_a_planted_missing_event_is_found(broken: type[CpuQueues]) -> None:
    assert unordered(log_of(broken()).log) != []


def test_a_missing_way_home_is_seen() -> None:
    # What the poisoned bench is worth: a step that is not written home changes the result.
    plain, broken = with_layers(None), with_layers(0)
    assert isinstance(broken.host.weights, StreamedLayers)
    broken.host.weights._ring.receive = lambda source, homes, views: None
    assert differing(weights_after(plain, 1), weights_after(broken, 1)) != []


def test_a_missing_way_to_the_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = with_layers(0)
    monkeypatch.setattr(Ring, "send", lambda self, buffer, target: 0)
    losses = []
    broken.loss_fn.register_forward_hook(lambda module, args, loss: losses.append(loss))
    broken()
    assert not losses[0].isfinite()


@pytest.mark.slow
def test_streamed_weights_do_not_compile_blocks_again() -> None:
    torch._dynamo.reset()
    keys: dict[str, Any] = {"rows": ((40, 30), (60, 10)), "shape": {"attention_bias": True}}
    plain, streamed = with_layers(None, **keys), with_layers(0, **keys)
    for one_step in (plain, streamed):
        compile_blocks(one_step.model)
    torch._dynamo.utils.counters.clear()
    first = weights_after(plain, 2)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2  # with and without gradients
    with torch._dynamo.config.patch(error_on_recompile=True):
        second = weights_after(streamed, 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert differing(first, second) == []
    torch._dynamo.reset()


def test_evaluation_by_visits_gives_the_same_hidden_states() -> None:
    one_step = with_layers(0)
    model, batch = one_step.model, one_step.group[0]
    context = model.context(batch.positions_BS, batch.segments_BM)
    with torch.no_grad():
        plain = model.hidden_states(model.embed(batch.tokens_BS), context)
        for _ in range(2):
            visit = one_step.host.visits(model.blocks)
            x_BSD = model.embed(batch.tokens_BS)
            streamed = model.hidden_states(x_BSD, context, around_block=visit)
            assert torch.equal(plain, streamed)


def test_weights_changed_at_home_between_steps_are_used() -> None:
    plain, streamed = with_layers(None), with_layers(0)
    for one_step in (plain, streamed):
        one_step()
        one_step.host.settle()
        with torch.no_grad():
            for parameter in one_step.model.blocks.parameters():
                parameter.mul_(0.5)
    assert differing(weights_after(plain, 1), weights_after(streamed, 1)) == []


def test_an_exception_in_a_visit_leaves_the_weights_at_home() -> None:
    one_step = with_layers(0)
    homes = [p.data_ptr() for p in one_step.model.parameters()]
    visit = one_step.host.visits(one_step.model.blocks)
    with pytest.raises(RuntimeError, match="planted"), visit():
        raise RuntimeError("planted")
    assert [p.data_ptr() for p in one_step.model.parameters()] == homes


def test_streamed_weights_are_loaded_to_host_memory_and_the_others_to_the_device(
    smollm2_dir: Path,
) -> None:
    from solotune.models import auto

    with torch.device("meta"):
        model: Decoder = auto(smollm2_dir)
    layers = StreamedLayers(model, resident=10)
    streamed = {name for name, p in model.named_parameters() if p in layers}
    assert len(streamed) == 20 * 7
    # Meta stands for a device that is not the host; a model that stays there is an error.
    with pytest.raises(RuntimeError, match="still on meta"):
        load_weights(model, smollm2_dir, device="meta", on_host=layers)
    loaded = {name for name, p in model.named_parameters() if not p.is_meta}
    assert loaded == streamed
    assert all(p.isfinite().all() and p.any() for p in model.parameters() if not p.is_meta)


def test_a_state_that_is_restored_lies_where_the_weights_step(tmp_path: Path) -> None:
    from solotune.checkpoint.training_state import TrainingState, load_training_state

    one_step = with_layers(0)
    one_step()
    keys: dict[str, Any] = {"model": one_step.model, "optimizer": one_step.stepper.optimizer}
    TrainingState(**keys, progress={"step": 1}, dtype=torch.float32).write(tmp_path)
    # The embedding says what the device is; blocks stay on the CPU.
    embedding = one_step.model.embed_tokens
    torch.utils.swap_tensors(embedding.weight, nn.Parameter(embedding.weight.data.to("meta")))
    load_training_state(tmp_path, **keys)
    for parameter, state in one_step.stepper.optimizer.state.items():
        assert parameter.is_meta == (parameter is embedding.weight)
        assert state["exp_avg"].is_meta


def test_the_gauge_sees_streamed_weights_step() -> None:
    figures = []
    for resident in (None, 0):
        one_step = with_layers(resident, dtype=torch.bfloat16)
        gauge = UpdateGauge(one_step.model, one_step.stepper)
        for _ in range(3):
            with gauge.watching():
                one_step()
        figures.append(gauge.lost)
    assert figures[0] == figures[1]
    assert figures[0] is not None


@pytest.mark.parametrize(
    ("on", "repair"),
    [
        ({"resident_layers": 2}, "optimizer_in_bwd=True"),
        (STREAMED | {"resident_layers": -1}, "0 or more"),
        (STREAMED | {"ac_mode": "selective", "ac_option": 2}, "ac_mode=full"),
    ],
    ids=str,
)
def test_keys_that_do_not_go_together_are_refused_with_the_repair(on, repair: str) -> None:
    checkpointed = NOTHING_ON | {"enable_activation_checkpointing": True}
    with pytest.raises(ConfigError, match=repair):
        check_memory_keys(checkpointed | on)


def test_one_unclipped_micro_batch_is_layer_major_too() -> None:
    on = NOTHING_ON | {"optimizer_in_bwd": True, "clip_grad_norm": None}
    assert not is_layer_major(on)
    assert is_layer_major(on | {"resident_layers": 0})


@pytest.mark.parametrize("resident", [LAYERS, LAYERS + 3])
def test_as_many_resident_layers_as_there_are_is_refused(resident: int) -> None:
    with pytest.raises(ConfigError, match=f"which has {LAYERS}"):
        StreamedLayers(OneStep().model, resident=resident)


@pytest.mark.parametrize("resident", range(LAYERS))
def test_resident_blocks_lie_between_the_streamed_ones(resident: int) -> None:
    model = OneStep().model
    layers = StreamedLayers(model, resident=resident)
    streamed = [all(p in layers for p in matrices(block)) for block in model.blocks]
    assert streamed.count(False) == resident
    runs = "".join("s" if is_streamed else "r" for is_streamed in streamed).split("r")
    assert max(map(len, runs)) <= -(-LAYERS // (resident + 1))


@pytest.mark.parametrize(("pins", "pinned"), [(0, 0), (1, 1), (2, 2), (5, 3)])
def test_a_failed_pin_shortens_the_ring_is_printed_and_ends_nothing(
    pins: int, pinned: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    made: list[bool] = []
    empty = torch.empty

    def limited(*args: Any, pin_memory: bool = False, **keys: Any) -> Tensor:
        if pin_memory and sum(made) == pins:
            raise RuntimeError("CUDA error: out of memory")
        made.append(pin_memory)
        return empty(*args, **keys)

    host = HostMemory(CPU)
    host._may_pin, host.device = True, torch.device("cuda")
    monkeypatch.setattr(torch, "empty", limited)
    ring = host.ring(1000)
    assert sum(made) == pinned
    assert len(ring.buffers) == max(2, pinned)
    assert ("cannot be pinned" in capsys.readouterr().out) == (pins < 3)


def test_a_run_without_streaming_takes_no_memory_for_it() -> None:
    gc.collect()
    host = HostMemory(CPU, weights=StreamedLayers(OneStep().model, resident=None))
    assert host.weights is not None
    assert list(host.weights.memory()) == []
    host.settle()


def test_adapters_stay_on_the_device_and_their_step_brings_no_weight_back() -> None:
    finals = []
    for resident in (None, 0):
        one_step = with_layers(resident, rows=((40, 30),), clip_grad_norm=1.0)
        inject(one_step.model, LoRA(rank=4, alpha=8.0, targets=["q_proj", "down_proj"]))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for parameter in adapter_parameters(one_step.model).values():
                filled = nn.Parameter(0.1 * torch.randn(parameter.shape))
                torch.utils.swap_tensors(parameter, filled)
        optimizer = torch.optim.AdamW(adapter_parameters(one_step.model).values(), lr=1e-2)
        one_step.stepper = Stepper(optimizer)
        layers = StreamedLayers(one_step.model, resident=resident)
        one_step.host = HostMemory(CPU, weights=layers, poison=True)
        moved = counted(one_step.host)
        finals.append(weights_after(one_step, 1))
    assert differing(*finals) == []
    frozen = [p for p in one_step.model.blocks[0].parameters() if not p.requires_grad]
    block = bytes_of(p for p in frozen if p.dim() > 1)
    assert moved == {"to device": (2 * LAYERS - 2) * block}


CARD = torch.device("cuda")


def on_card(resident: int | None, *, layers: int = 8) -> OneStep:
    """Return a step on the card of a model of some size, its streamed weights in host memory."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers}
    one_step = OneStep(
        **{**LAYER_MAJOR, "dtype": torch.bfloat16, "shape": shape, "resident_layers": None}
    )
    model = one_step.model
    streamed = StreamedLayers(model, resident=resident)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(CPU if parameter in streamed else CARD)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(CARD)
    one_step.host = HostMemory(CARD, weights=streamed, poison=True)
    one_step.group = [batch.to(CARD) for batch in one_step.group]
    return one_step


@pytest.mark.gpu
def test_on_a_card_the_peak_falls_by_the_streamed_blocks_but_two() -> None:
    peaks = []
    for resident in (None, 0):
        gc.collect()
        torch.cuda.empty_cache()
        one_step = on_card(resident)
        one_step()
        torch.cuda.reset_peak_memory_stats()
        one_step()
        peaks.append(torch.cuda.max_memory_allocated())
        block = bytes_of(matrices(one_step.model.blocks[0]))
        del one_step
    assert peaks[0] - peaks[1] == pytest.approx(6 * block, rel=0.02)


@pytest.mark.gpu
def test_on_a_card_nothing_waits_for_the_device_but_the_one_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_step = on_card(2)
    one_step()  # makes the state
    read = HostMemory.read

    def allowed(self: HostMemory, *values: Tensor) -> list[float]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(self, *values)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(HostMemory, "read", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            one_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_on_a_card_fifty_steps_are_bit_equal() -> None:
    set_seed(42, deterministic=True)
    try:
        plain, streamed = on_card(None), on_card(3)
        for one_step in (plain, streamed):
            for _ in range(50):
                one_step()
            one_step.host.settle()
    finally:
        torch.use_deterministic_algorithms(False)
    for (name, one), other in zip(
        plain.model.named_parameters(), streamed.model.parameters(), strict=True
    ):
        assert torch.equal(one.cpu(), other.cpu()), name
