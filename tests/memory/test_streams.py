"""What a card could do in the wrong order is found in the log of a CPU run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from solotune.losses import LinearCrossEntropy
from solotune.memory import HostMemory, Stepper, checkpoint_blocks, layer_major_step
from solotune.memory.host import Moved
from solotune.memory.streams import COPY, CpuQueues, Mark, unordered
from tests.models.tiny import accumulate_gradients, make_batch, tiny

CPU = torch.device("cpu")


class WithoutWait(CpuQueues):
    """Forgets to let the computation wait for a copy."""

    def wait(self, event: int) -> None:
        pass


class CopyTooEarly(CpuQueues):
    """Forgets to let a copy wait for what is computed before it."""

    def copy(self, target: Tensor, source: Tensor, *, after: int | None = None) -> int:
        done = super().copy(target, source, after=after)
        first = next(i for i in reversed(range(len(self.log))) if _is_wait(self.log[i]))
        del self.log[first]
        return done


def _is_wait(entry: object) -> bool:
    return isinstance(entry, Mark) and (entry.queue, entry.kind) == (COPY, "wait")


def there_and_back(host: HostMemory) -> None:
    """Move three tensors to the host and back, the last first, as a backward does."""
    sources = [torch.randn(64) for _ in range(3)]
    moved = [Moved(host, source) for source in sources]
    for source, one in zip(reversed(sources), reversed(moved), strict=True):
        assert torch.equal(one.take(), source)


def logged(queues: CpuQueues, work: Callable[[HostMemory], None]) -> CpuQueues:
    host = HostMemory(CPU)
    queues.logging = True
    host.queues = queues
    work(host)
    return queues


def test_moving_there_and_back_is_ordered() -> None:
    queues = logged(CpuQueues(), there_and_back)
    assert len(queues.log) > 20
    assert unordered(queues.log) == []


@pytest.mark.parametrize("broken", [WithoutWait, CopyTooEarly])
def test_a_planted_missing_event_is_found(broken: type[CpuQueues]) -> None:
    assert unordered(logged(broken(), there_and_back).log) != []


def test_a_buffer_that_is_used_again_stays_ordered() -> None:
    def twice(host: HostMemory) -> None:
        there_and_back(host)
        there_and_back(host)

    assert unordered(logged(CpuQueues(), twice).log) == []


def test_an_offloaded_and_a_layer_major_step_are_ordered() -> None:
    model = tiny(num_hidden_layers=3)
    batches = [make_batch([20, 12], [32], seed=seed) for seed in range(2)]

    def offloaded(host: HostMemory) -> None:
        checkpoint_blocks(model)
        accumulate_gradients(model, batches, host=host)
        model.zero_grad()

    def layer_major(host: HostMemory) -> None:
        stepper = Stepper(torch.optim.SGD(model.parameters(), lr=0.1))
        targets = sum(batch.num_targets for batch in batches)
        loss_fn = LinearCrossEntropy()
        layer_major_step(model, loss_fn, stepper, batches, targets, clip=1.0, host=host)

    for work in (offloaded, layer_major):
        queues = logged(CpuQueues(), work)
        assert len(queues.log) > 20, "nothing was moved"
        assert unordered(queues.log) == []
