"""Weights in 4 bits are bitsandbytes', and no schedule keeps more of them than their bytes."""

import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from solotune.adapters import (
    FourBit,
    LoRA,
    four_bit_linears,
    initialize,
    inject,
    nf4_product,
    quantize_linears,
)
from solotune.adapters import nf4 as nf4_file
from solotune.adapters.nf4 import pack
from solotune.adapters.nf4_product import dense_weight, linear
from solotune.checkpoint import load_weights
from solotune.data.batch import Batch
from solotune.errors import ConfigError
from solotune.losses import LinearCrossEntropy
from solotune.memory import (
    HostMemory,
    Stepper,
    StreamedLayers,
    checkpoint_blocks,
    compile_blocks,
    layer_major_step,
)
from solotune.memory.tracker import MemoryTracker
from solotune.models import Decoder, auto
from solotune.models.linear import Linear
from solotune.training import parameter_lines, set_dtype
from tests.models.tiny import accumulate_gradients, forward, make_batch, take_gradients, tiny

from .four_bit_model import dense_twin, load, write_folder

ROWS = ((20, 9, 4), (33,))
SIZES: dict[str, Any] = {"intermediate_size": 192, "num_hidden_layers": 3, "attention_bias": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", **SIZES)


@pytest.fixture
def model(folder: Path) -> Decoder:
    return load(folder)[0]


def random_weight(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (0.02 * torch.randn(shape, generator=generator)).to(dtype)


def packed_of(dense: Tensor, layout: FourBit) -> Tensor:
    packed = torch.empty(layout.num_bytes, dtype=torch.uint8)
    pack(dense, packed, layout)
    return packed


# --- one weight -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(192, 576), (260, 512), (6, 10)])
def test_numbers_product_and_gradient_are_those_of_linear4bit(
    dtype: torch.dtype, kind: str, double: bool, shape: tuple[int, int]
) -> None:
    """Also where blocks cross rows and the last block is not full; bit by bit."""
    dense = random_weight(*shape, dtype=dtype)
    layout = FourBit(*shape, kind, double=double)
    packed = packed_of(dense, layout)
    bias = random_weight(shape[0], dtype=dtype)
    nn: Any = bitsandbytes.nn  # which has no types
    theirs = nn.Linear4bit(shape[1], shape[0], compute_dtype=dtype)
    theirs.weight = nn.Params4bit(
        dense.clone(), requires_grad=False, quant_type=kind, compress_statistics=double
    )
    theirs.bias = torch.nn.Parameter(bias.clone())
    theirs = theirs.to("cpu")

    wanted = dequantize_4bit(theirs.weight, theirs.weight.quant_state)
    assert torch.equal(dense_weight(packed, layout, dtype), wanted)
    x, their_x = (torch.linspace(-1, 1, 70 * shape[1]).view(2, 35, -1).to(dtype) for _ in range(2))
    ours = linear(x.requires_grad_(), packed, bias.requires_grad_(), layout)
    wanted = theirs(their_x.requires_grad_())
    assert torch.equal(ours, wanted)
    grad = random_weight(*ours.shape, dtype=dtype)
    ours.backward(grad)
    wanted.backward(grad)
    assert x.grad is not None
    assert their_x.grad is not None
    assert torch.equal(x.grad, their_x.grad)
    torch.testing.assert_close(bias.grad, grad.float().sum((0, 1)).to(dtype), rtol=2e-2, atol=1e-4)


def test_a_weight_is_the_same_however_many_pieces_it_is_made_in(monkeypatch) -> None:
    dense = random_weight(192, 576, dtype=torch.bfloat16)
    layout = FourBit(192, 576)
    whole = packed_of(dense, layout)
    monkeypatch.setattr(nf4_file, "_PIECE", {"cpu": 1024})
    assert torch.equal(packed_of(dense, layout), whole)


def test_a_parameter_takes_4_13_bits() -> None:
    """4 + 8/64 + 32/(64 * 256), and 4.5 with scales in fp32; 1.5 KiB of tables for each weight."""
    for shape in ((4096, 14336), (1024, 4096)):
        bits = 8 * FourBit(*shape).num_bytes / (shape[0] * shape[1])
        assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=4e-3)
        bits = 8 * FourBit(*shape, double=False).num_bytes / (shape[0] * shape[1])
        assert bits == pytest.approx(4.5, abs=4e-3)


def test_the_product_keeps_nothing_but_the_packed_weight() -> None:
    layout = FourBit(192, 576)
    packed = packed_of(random_weight(192, 576, dtype=torch.float32), layout)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(torch.ones(3, 576, requires_grad=True), packed, None, layout)
    assert [t.untyped_storage().data_ptr() for t in kept] == [packed.data_ptr()]


def test_a_plan_sees_the_dense_weight() -> None:
    """On fake tensors the operators' own code runs: what is on them is never kept for real ones."""
    layout = FourBit(512, 256)
    with FakeTensorMode() as mode:
        packed = torch.empty(layout.num_bytes, dtype=torch.uint8)
        x = torch.empty(3, 40, 256)
    seen: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            seen.extend(tuple(t.shape) for t in [result] if isinstance(t, Tensor))
            return result

    for operator, output in (
        (nf4_product._linear, (3, 40, 512)),
        (nf4_product._linear_backward, (3, 40, 256)),
    ):
        seen.clear()
        given = (x,) if output[-1] == 512 else (x.new_empty(3, 40, 512),)
        bias = (None,) if output[-1] == 512 else ()
        with mode, Watch():
            result = operator._init_fn(*given, packed, *bias, *nf4_product._values(layout))
        assert tuple(result.shape) == output
        assert (512, 256) in seen
    real = packed_of(random_weight(512, 256, dtype=torch.float32), layout)
    assert torch.isfinite(dense_weight(real, layout, torch.float32)).all()


@pytest.mark.parametrize("breaks", [None, RuntimeError("no native library")])
def test_a_missing_or_broken_bitsandbytes_is_one_sentence(monkeypatch, breaks) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "bitsandbytes":
                raise breaks

    monkeypatch.delitem(sys.modules, "bitsandbytes")
    if breaks is None:
        monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    else:
        monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    nf4_file.bitsandbytes.cache_clear()
    with pytest.raises(ConfigError, match=r"need bitsandbytes.*pip install.*quantize_base=null"):
        nf4_file.bitsandbytes()


# --- a model ----------------------------------------------------------------------------------


def test_the_blocks_matrices_are_quantised_and_nothing_else(folder: Path) -> None:
    model, report = load(folder, dtype=torch.bfloat16)
    matrices = {
        n for n, m in model.named_modules() if n.startswith("layers.") and isinstance(m, Linear)
    }
    assert {name.removesuffix(".weight") for name in four_bit_linears(model)} == matrices
    assert len(matrices) == 3 * 7
    names = dict(model.named_parameters()).keys()
    assert names == dict(tiny(**SIZES).named_parameters()).keys()
    assert model.output_weight.dtype == torch.bfloat16
    assert model.get_parameter("layers.0.self_attn.q_proj.bias").dtype == torch.float32
    total = sum(p.numel() for p in tiny(**SIZES).parameters())
    linears = sum(m.layout.num_numbers for m in four_bit_linears(model).values())
    assert report.num_parameters == total
    assert f"4-bit: {linears:,} parameters of {total:,}, " in "\n".join(report.lines())
    assert report.dtype_loaded["nf4"] == linears
    num_bytes = sum(m.layout.num_bytes for m in four_bit_linears(model).values())
    assert f"{num_bytes:,} bytes in 21 tensors, uint8 on cpu" in parameter_lines(model)[0]


def test_setting_the_dtype_leaves_the_bytes(model: Decoder) -> None:
    before = model.get_parameter("layers.0.mlp.up_proj.weight").clone()
    set_dtype(model, torch.bfloat16)
    assert torch.equal(model.get_parameter("layers.0.mlp.up_proj.weight"), before)


def test_gradients_are_those_of_the_dequantised_model(model: Decoder, folder: Path) -> None:
    batch = make_batch(*ROWS)
    loss = accumulate_gradients(model, [batch])
    twin = dense_twin(model, folder)
    assert torch.allclose(loss, accumulate_gradients(twin, [batch]), rtol=1e-6)
    found, wanted = take_gradients(model), take_gradients(twin)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def gradients(model: Decoder, batch: Batch, host: HostMemory | None = None) -> dict[str, Tensor]:
    accumulate_gradients(model, [batch], host=host)
    return take_gradients(model)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_checkpointing_and_offloading_change_no_bit_and_move_no_weight(
    model: Decoder, checkpointing: bool
) -> None:
    batch, host = make_batch(*ROWS), HostMemory(torch.device("cpu"), poison=True)
    wanted = gradients(model, batch)
    packed = {name: module.weight.clone() for name, module in four_bit_linears(model).items()}
    if checkpointing:
        checkpoint_blocks(model)
        assert_equal(gradients(model, batch), wanted)
    assert_equal(gradients(model, batch, host), wanted)
    if checkpointing:
        assert host.bytes_moved == (3 - 1) * 4 * batch.tokens_BS.numel() * 64
    assert all(torch.equal(model.get_parameter(name), before) for name, before in packed.items())


@pytest.mark.parametrize("resident", [None, 1])
def test_the_layer_major_schedule_changes_no_bit(folder: Path, resident: int | None) -> None:
    """Also where packed weights are streamed from the host."""
    batches = [make_batch(*ROWS, seed=seed) for seed in range(2)]
    num_targets = sum(batch.num_targets for batch in batches)
    plain, ours = load(folder)[0], load(folder)[0]
    checkpoint_blocks(plain)
    optimizer, stepper = (
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for m in (plain, ours)
    )
    accumulate_gradients(plain, batches)
    optimizer.step()
    layer_major_step(
        ours,
        LinearCrossEntropy(chunk_tokens=16),
        Stepper(stepper),
        batches,
        num_targets,
        clip=None,
        host=HostMemory(torch.device("cpu"), weights=StreamedLayers(ours, resident=resident)),
    )
    for name, parameter in plain.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_compiled_blocks_keep_no_dense_weight(model: Decoder, checkpointing: bool) -> None:
    torch._dynamo.reset()
    batch = make_batch(*ROWS)
    wanted = gradients(model, batch)
    if checkpointing:
        checkpoint_blocks(model)
    compile_blocks(model)
    torch._dynamo.utils.counters.clear()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = gradients(model, batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    shapes = {tuple(sorted(m.layout.shape)) for m in four_bit_linears(model).values()}
    assert kept
    assert not [t for t in kept if t.is_floating_point() and tuple(sorted(t.shape)) in shapes]
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_autocast_computes_in_bf16(model: Decoder) -> None:
    layer = four_bit_linears(model)["layers.0.mlp.up_proj.weight"]
    x = torch.linspace(-1, 1, 5 * 64).view(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x.bfloat16()))
    assert layer(x).dtype == torch.float32


@torch.inference_mode()
def test_a_cache_gives_the_logits_of_a_whole_forward_pass(model: Decoder) -> None:
    batch = make_batch((12,))
    whole = forward(model, batch)
    cache = model.new_cache(1, 12)
    for position in range(12):
        context = model.context(torch.tensor([[position]]), None, cache)
        hidden = model.hidden_states(
            model.embed(batch.tokens_BS[:, position : position + 1]), context
        )
        torch.testing.assert_close(hidden[0, 0], whole[0, position], rtol=1e-4, atol=1e-5)


def test_the_tracker_counts_packed_weights_as_weights(model: Decoder) -> None:
    loss_fn, batch = LinearCrossEntropy(chunk_tokens=16), make_batch(*ROWS)
    stepper = Stepper(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    host = HostMemory(torch.device("cpu"))
    with MemoryTracker(model, loss_fn=loss_fn, stepper=stepper, host=host) as tracker:
        x_BSD = model.embed(batch.tokens_BS).requires_grad_()
        hidden_BSD = forward(model, batch, x_BSD=x_BSD)
        loss_fn(hidden_BSD, model.output_weight, batch, batch.num_targets).backward()
    weights = tracker.timeline().bytes_E["device", "weights"]
    tensors = (*model.parameters(), *model.buffers())
    assert set(weights.tolist()) == {sum(tensor.nbytes for tensor in tensors)}


def test_adapters_train_over_4_bit_weights_and_leave_their_bytes(folder: Path) -> None:
    with torch.device("meta"):
        model = auto(folder)
    quantize_linears(model)
    names = inject(model, LoRA(rank=4, alpha=8, targets="all-linear"))
    load_weights(model, folder, device="cpu")
    initialize(model, 0)
    before = {name: m.weight.clone() for name, m in four_bit_linears(model).items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    batch, losses = make_batch(*ROWS), []
    for _ in range(5):
        losses.append(float(accumulate_gradients(model, [batch])))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.05
    assert len(names) == len(before) == 21
    assert all(torch.equal(model.get_parameter(name), packed) for name, packed in before.items())
