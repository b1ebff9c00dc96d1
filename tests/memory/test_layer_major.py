"""All micro-batches go through one block before the next, and one block's gradients are alive."""

import math
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from solotune.losses import LinearCrossEntropy
from solotune.memory import HostMemory, StateHome, Stepper, layer_major_step
from solotune.models import Decoder
from solotune.optim import AdamWKahan, decay_groups
from solotune.training import set_dtype
from tests.models.tiny import make_batch, tiny

CPU = torch.device("cpu")
BATCHES = [make_batch([20, 12], [32], seed=seed) for seed in range(3)]
TARGETS = sum(batch.num_targets for batch in BATCHES)


class WatchedStepper(Stepper):
    """Notes how many bytes of gradients are alive at each step."""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.model = model
        self.alive_bytes: list[int] = []

    def step(self, parameters) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.alive_bytes.append(sum(grad.nbytes for grad in grads))
        super().step(parameters)


def bytes_of(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_one_block_of_gradients_is_alive_at_a_time(tied: bool) -> None:
    model = tiny(num_hidden_layers=4, tie_word_embeddings=tied)
    stepper = WatchedStepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    args = (model, LinearCrossEntropy(), stepper, BATCHES, TARGETS)
    layer_major_step(*args, clip=None, host=HostMemory(CPU))
    head, *blocks, embedding = stepper.alive_bytes
    block = bytes_of(model.blocks[0])
    # Tied, the head's gradient is the embedding's: it waits for the lookup's share at the end.
    waiting = model.embed_tokens.weight.nbytes if tied else 0
    assert blocks == [block + waiting] * 4
    assert embedding == model.embed_tokens.weight.nbytes
    assert head == bytes_of(model.norm) + model.output_weight.nbytes
    assert all(p.grad is None for p in model.parameters())
    print(f"gradients: {block} bytes of {bytes_of(model)}")


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_gradient_that_waits_on_the_host_gives_the_same_bits(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> tuple[Decoder, HostMemory]:
        torch.manual_seed(0)
        model = set_dtype(tiny(tie_word_embeddings=tied), torch.bfloat16)
        stepper = Stepper(AdamWKahan(decay_groups(model), lr=1e-3))
        host = HostMemory(CPU)
        args = (model, LinearCrossEntropy(chunk_tokens=16), stepper, BATCHES, TARGETS)
        layer_major_step(*args, clip=None, host=host)
        return model, host

    stays, host = step()
    monkeypatch.setattr("solotune.memory.layer_major.device_kind", lambda tensor: "cuda")
    leaves, host_of_leaving = step()
    for ours, theirs in zip(leaves.parameters(), stays.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    moved = host_of_leaving.bytes_moved - host.bytes_moved
    assert moved == leaves.output_weight.nbytes


def test_the_second_pass_of_clipping_brings_gradients_back_two_at_a_time() -> None:
    model = tiny(num_hidden_layers=4)
    alive: list[int] = []
    refs: list[weakref.ref] = []

    class Counting(Stepper):
        def step(self, parameters) -> None:
            refs.extend([weakref.ref(p.grad) for p in parameters if p.grad is not None])
            alive.append(sum(ref() is not None for ref in refs))
            super().step(parameters)

    stepper = Counting(torch.optim.SGD(model.parameters(), lr=0.1))
    args = (model, LinearCrossEntropy(), stepper, BATCHES, TARGETS)
    layer_major_step(*args, clip=1.0, host=HostMemory(CPU))
    assert len(alive) == len(list(model.parameters()))
    assert max(alive) <= 2


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_loss_that_is_not_finite_moves_no_weight(clip: float | None) -> None:
    model = tiny()
    with torch.no_grad():
        next(model.norm.parameters())[0] = math.nan
    before = [p.clone() for p in model.parameters()]
    stepper = Stepper(torch.optim.SGD(model.parameters(), lr=0.1))
    args = (model, LinearCrossEntropy(), stepper, BATCHES, TARGETS)
    loss, _ = layer_major_step(*args, clip=clip, host=HostMemory(CPU))
    assert math.isnan(loss)
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old.nan_to_num(), parameter.nan_to_num())
        assert parameter.grad is None


@pytest.mark.parametrize("where", ["host", "disk"])
def test_state_away_from_the_device_is_moved_and_changes_no_bit(where: str, tmp_path: Path) -> None:
    finals = []
    for away in (False, True):
        model = set_dtype(tiny(), torch.bfloat16)
        optimizer = AdamWKahan(decay_groups(model), lr=1e-2)
        host, home = HostMemory(CPU), None
        if away:
            folder = tmp_path / "state" if where == "disk" else None
            home = StateHome(optimizer, host=host, folder=folder)
        stepper = Stepper(optimizer, home)
        for _ in range(3):
            args = (model, LinearCrossEntropy(), stepper, BATCHES, TARGETS)
            layer_major_step(*args, clip=None, host=host)
        if home is not None:
            home.flush()
            large = [s.home for slots in home._slots.values() for s in slots]
            # Two fp32 moments and the remainder of every matrix.
            matrices = [p for p in model.parameters() if p.dim() > 1]
            assert home.num_bytes == sum(p.numel() * 10 for p in matrices)
            states = [t for s in optimizer.state.values() for t in s.values()]
            addresses = {t.data_ptr() for t in states if isinstance(t, torch.Tensor)}
            assert all(t.data_ptr() in addresses for t in large), "the state is home after a flush"
            if where == "disk":
                on_disk = sum(path.stat().st_size for path in (tmp_path / "state").iterdir())
                assert on_disk == home.num_bytes
            home.close()
            assert not (tmp_path / "state").exists()
        finals.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_a_paged_optimizer_is_refused_with_the_repair() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    setattr(optimizer, "is_paged", True)  # noqa: B010  # as bitsandbytes' paged optimizers say
    with pytest.raises(Exception, match="optimizer_state=device"):
        StateHome(optimizer, host=HostMemory(CPU), folder=None)
