"""Layer-major schedule: all micro-batches through one block before the next.

Accumulation and clipping with the optimizer in backward, exactly: when a block has seen all
micro-batches its gradient is complete, and it alone is alive.

Saves:    all gradients but one block's (and the head's and the embedding's).
Costs:    every block's inputs of all micro-batches wait on the host, and for one block the head's
          gradient; it implies full activation checkpointing. Clipping parks the gradients on the
          host, 2 bytes a parameter.
Excludes: nothing.
Label:    bit-exact; with clipping reordered. Figures: docs/layer_major.md

Shapes: B batch, S tokens, D width.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from solotune.data import Batch
from solotune.device_kind import device_kind
from solotune.memory.host import HostMemory, Moved
from solotune.memory.stepping import Stepper
from solotune.models import Decoder
from solotune.training.clipping import norms_of

LAYER_MAJOR_FACT = (
    "optimizer_in_bwd with accumulation, clipping or resident_layers: layer-major schedule, which "
    "implies full activation checkpointing; block inputs, and with clipping gradients, wait on the "
    "host"
)


def layer_major_step(
    model: Decoder,
    loss_fn: Callable[..., Tensor],
    stepper: Stepper,
    group: Sequence[Batch],
    num_targets: int,
    *,
    clip: float | None,
    host: HostMemory,
) -> tuple[float, float | None]:
    """One optimizer step over micro-batches on the device; returns mean loss and gradient norm.

    The same sums in the same order as plain accumulation. The device is read once: the loss before
    the first parameter steps, or loss and norm together where clipping holds the steps back.
    Weights stay where a number read is not finite, or `num_targets` is 0.
    """
    contexts = [
        model.context(batch.positions_BS, batch.segments_BM, key=batch.key) for batch in group
    ]
    gradients = None if clip is None else _Parked(host)

    def complete(parameters: Sequence[nn.Parameter]) -> None:
        if gradients is not None:
            gradients.take(parameters)
            return
        stepper.step(parameters)
        for parameter in parameters:
            parameter.grad = None

    lowest = _lowest_trained(model)
    downwards = list(model.blocks)[lowest:][::-1]
    returning = [] if gradients is None else [b for b in downwards if _steps_away(b, host)]
    visit = host.visits([*model.blocks, *downwards, *returning])

    # Forward: of each block only its inputs are kept; of frozen ones at the bottom nothing.
    hidden = [model.embed(batch.tokens_BS) for batch in group]
    inputs: list[list[Moved]] = []
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            if number >= lowest:
                inputs.append([host.move_activation(x_BSD) for x_BSD in hidden])
            with visit():
                for index, context in enumerate(contexts):  # in place: one list of them at a time
                    hidden[index] = block(hidden[index], context)

    # The head: final norm, projection, loss.
    mean_loss = torch.zeros((), device=model.device)
    for index, batch in enumerate(group):
        x_BSD = hidden[index].requires_grad_(bool(inputs))
        loss = loss_fn(model.norm(x_BSD), model.head, batch, num_targets)
        loss.backward()
        mean_loss += loss.detach()
        hidden[index] = x_BSD.grad if x_BSD.grad is not None else torch.zeros_like(x_BSD)
    model.round_head_gradient()
    away = deque[Moved]()
    if gradients is None and downwards:
        away.extend(_send_away(model.output_weight, host))
    loss_value = math.nan
    if gradients is None:
        (loss_value,) = host.read(mean_loss)
        if not (num_targets and math.isfinite(loss_value)):
            _drop_gradients(model)
            return loss_value, None
    embedding = list(model.embed_tokens.parameters())
    inside = {id(p) for p in (*model.blocks.parameters(), *embedding)}
    head = [p for p in model.parameters() if id(p) not in inside]

    if not away:
        complete(head)

    # Backward, from the top: recompute a block for each micro-batch, then let it step.
    waiting = deque(moved for block_inputs in reversed(inputs) for moved in block_inputs)
    inputs.clear()
    for block in downwards:
        with visit(writes=gradients is None):
            for index, context in enumerate(contexts):
                moved = waiting.popleft()
                if waiting:  # the next one's copy runs beside this one's computation
                    waiting[0].fetch()
                if len(waiting) > 1:
                    waiting[1].read_ahead()
                goes_on = block is not downwards[-1] or _is_trained(model.embed_tokens)
                x_BSD = moved.take().requires_grad_(goes_on)
                block(x_BSD, context).backward(hidden[index])
                if x_BSD.grad is not None:
                    hidden[index] = x_BSD.grad
            complete(list(block.parameters()))
            if away:
                model.output_weight.grad = away.pop().take()
                complete(head)

    tokens = [batch.tokens_BS for batch in group]
    model.add_embedding_gradient(list(zip(tokens, hidden, strict=True)))
    complete(embedding)
    if gradients is None or clip is None:
        return loss_value, None

    norm = gradients.norm()
    loss_value, norm_value = host.read(mean_loss, norm)
    if num_targets and math.isfinite(loss_value) and math.isfinite(norm_value):
        factor = (clip / (norm + 1e-6)).clamp(max=1.0)

        def step(parameters: Iterable[nn.Parameter]) -> None:
            for parameter, gradient in gradients.give_back(parameters):
                parameter.grad = gradient.mul_(factor)
                stepper.step([parameter])
                parameter.grad = None

        step(head)
        for block in downwards:
            with visit(writes=True) if block in returning else nullcontext():
                step(block.parameters())
        step(embedding)
    return loss_value, norm_value


def _send_away(weight: Tensor, host: HostMemory) -> list[Moved]:
    """Send the head's gradient to the host until the top block has gone back; empty: it stays.

    Summed in fp32 and rounded in place it holds twice its memory, and its step wants the state's.
    Where device and host are one, nothing would be gained.
    """
    gradient = weight.grad
    if gradient is None or device_kind(weight) == "cpu":
        return []
    if gradient.untyped_storage().nbytes() == gradient.nbytes:
        return []
    weight.grad = None
    return [Moved(host, gradient)]


class _Parked:
    """Complete gradients on the host, with their norms."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._moved: deque[tuple[nn.Parameter, Moved]] = deque()
        self._norms: list[Tensor] = []

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._norms += norms_of([parameter.grad])
                self._moved.append((parameter, Moved(self._host, parameter.grad)))
                parameter.grad = None

    def norm(self) -> Tensor:
        """Return the global L2 norm, in fp32, on the device."""
        return torch.linalg.vector_norm(torch.stack(self._norms))

    def give_back(
        self, parameters: Iterable[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield `parameters` with their gradients on the device, in the order they were taken in.

        One is fetched ahead; what was given back is not kept here.
        """
        for parameter in parameters:
            if not (self._moved and self._moved[0][0] is parameter):
                continue  # it has no gradient
            _, moved = self._moved.popleft()
            if self._moved:
                self._moved[0][1].fetch()
            yield parameter, moved.take()


def _lowest_trained(model: Decoder) -> int:
    """Return the number of the first block that backward must reach."""
    if _is_trained(model.embed_tokens):
        return 0
    trained = [_is_trained(block) for block in model.blocks]
    return trained.index(True) if any(trained) else len(trained)


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _steps_away(block: nn.Module, host: HostMemory) -> bool:
    """Whether trained weights of a block must be brought to the device before they step."""
    away = host.weights or ()
    return any(p.requires_grad and p in away for p in block.parameters())


def _drop_gradients(model: Decoder) -> None:
    for parameter in model.parameters():
        parameter.grad = None
