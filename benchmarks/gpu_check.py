"""What only a card can show, in one run of at most eight minutes.

    PYTHONPATH=src python benchmarks/gpu_check.py

The ladder with a 1B and an 8B model, the 24 GB schedule on 8B, the same weights with and without
offloading, and fifty steps of everything that copies beside the computation, against plain steps.
Needs torch 2.11 and no other package than tokenizers, safetensors, jinja2, tqdm and PyYAML. Without
a card the same code runs on CPU with small shapes. Exit status 1 where something is not as claimed.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from figures import GIB
from ladder import WORK, Work, peaks_on_card, run, timed
from random_model import RandomTensors, on_meta
from torch import Tensor

from solotune.data import Batch
from solotune.losses import LinearCrossEntropy
from solotune.memory import (
    HostMemory,
    StateHome,
    Stepper,
    StreamedLayers,
    checkpoint_blocks,
    layer_major_step,
    offload_activations,
    register_steps,
    step_in_backward,
)
from solotune.models import Decoder
from solotune.models.llama import llama, llama3_1_8b
from solotune.optim import decay_groups
from solotune.training import pick_device, set_seed

CARD_GIB = 22.0  # of 24 GB: the rest is the driver's and the allocator's
SMALL_CARD_GIB = 7.0  # of 8
NUM_STEPS = 50


@dataclass(frozen=True)
class Way:
    """How a step is made. More than one micro-batch in backward is the layer-major schedule."""

    micro_batches: int = 1
    offloading: bool = False
    in_backward: bool = False
    state_on_host: bool = False
    resident: int | None = None  # blocks whose weights stay on the device


def small(layers: int, width: int, vocab: int) -> Decoder:
    """Build a Llama of a few layers, with an output weight of its own."""
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 3 * width}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    with torch.device("meta"):
        return llama(llama3_1_8b().config | sizes | heads | {"vocab_size": vocab})


def main() -> None:
    device = pick_device("auto")
    on_card = device.type == "cuda"
    set_seed(42, deterministic=True)  # sets what must stand before the first matrix product
    start, faults = time.monotonic(), []

    def part(name: str, check: Callable[[], list[str]]) -> None:
        print(f"\n== {name}, after {time.monotonic() - start:.0f} s", flush=True)
        try:
            found = check()
        except Exception as error:  # the other parts are worth running all the same
            found = [f"{type(error).__name__}: {error}"]
        print("\n".join(f"FAILED {fault}" for fault in found) or "ok", flush=True)
        faults.extend(found)

    tiny = Work(partial(small, 2, 256, 1000), batch_size=2, max_seq_len=128, num_batches=2)
    if on_card:
        ladder = {name: WORK["cuda"][name] for name in ("1B", "8B")}
        streams = Work(partial(small, 6, 1024, 32000), 2, 1024, num_batches=4)
        large = Work(llama3_1_8b, batch_size=1, max_seq_len=2048, num_batches=8)
        one = WORK["cuda"]["1B"]
    else:
        ladder, streams, large, one = {"small": tiny}, tiny, tiny, tiny
    random = RandomTensors(device)

    part("offloading changes no bit", partial(compare, one, random, Way(offloading=True), 3))
    parts = {
        "in backward, offloaded, state on host": Way(1, True, True, True),
        "layer-major, state on host": Way(2, False, True, True),
        "layer-major, all layers streamed, state on host": Way(2, False, True, True, 0),
    }
    for name, way in parts.items():
        part(f"{NUM_STEPS} steps, {name}", partial(compare, streams, random, way, NUM_STEPS))
    torch.use_deterministic_algorithms(False)
    part("the 24 GB schedule", partial(fit, large, random, Way(8, False, True, True), CARD_GIB))
    streamed = Way(8, False, True, True, 0)
    part("all layers streamed", partial(fit, large, random, streamed, SMALL_CARD_GIB))
    part("the ladder", partial(climb, ladder, device))
    print(f"\n{len(faults)} failed, {time.monotonic() - start:.0f} s")
    sys.exit(bool(faults))


def climb(work: dict[str, Work], device: torch.device) -> list[str]:
    """Print the ladder's tables."""
    print(run(work, device))
    return []


def compare(work: Work, random: RandomTensors, way: Way, num_steps: int) -> list[str]:
    """Train twice from the same weights, plainly and in this way; return what differs."""
    weights = []
    for one in (Way(micro_batches=way.micro_batches), way):
        trainer = Trainer(work, random, one)
        for number in range(num_steps):
            trainer.step(number)
            trash(trainer.model.device)
        trainer.host.settle()
        weights.append({name: p.detach().cpu() for name, p in trainer.model.named_parameters()})
    plain, other = weights
    broken = [name for name, weight in other.items() if not weight.isfinite().all()]
    differing = [name for name, weight in other.items() if not torch.equal(weight, plain[name])]
    return [f"{len(names)} weights {what}, {names[0]} first" for names, what in (
        (broken, "are not finite"), (differing, "differ from plain steps")) if names]  # fmt: skip


def trash(device: torch.device) -> None:
    """Fill freed memory with NaN: a copy that still reads it, unordered, is found out."""
    blocks = [torch.empty(2**k, device=device) for k in range(10, 22) for _ in range(4)]
    for block in blocks:
        block.fill_(torch.nan)


def fit(work: Work, random: RandomTensors, way: Way, most_gib: float) -> list[str]:
    """Make two steps as the config of 8B does, and print peaks and speed."""
    trainer = Trainer(work, random, way, eight_bits=True)
    device = trainer.model.device
    trainer.step(0)
    with peaks_on_card(device) as peaks:
        seconds = timed(lambda: trainer.step(1), device)
    tokens = sum(batch.num_tokens for batch in trainer.group(1))
    print(f"{type(trainer.stepper.optimizer).__name__}, {tokens / seconds:,.0f} tokens/s")
    print(", ".join(f"{name} {num / GIB:.2f} GiB" for name, num in peaks.items()))
    if peaks.get("allocated", 0) > most_gib * GIB:
        return [f"the peak is above {most_gib} GiB"]
    return []


class Trainer:
    """A model and how it steps."""

    def __init__(
        self, work: Work, random: RandomTensors, way: Way, *, eight_bits: bool = False
    ) -> None:
        self.way = way
        model = on_meta(work.build)
        layers = StreamedLayers(model, resident=way.resident)
        self.model = random.fill(model, on_host=layers)
        device = self.model.device
        self.host = HostMemory(device, weights=layers, poison=True)
        self.loss_fn = LinearCrossEntropy()
        groups = decay_groups(self.model)
        if eight_bits and find_spec("bitsandbytes"):
            from bitsandbytes.optim.adamw import AdamW8bit

            optimizer = AdamW8bit(groups, lr=1e-4)
        else:
            if eight_bits:
                print("8-bit state: skipped, bitsandbytes is not installed")
            optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        home = StateHome(optimizer, host=self.host, folder=None) if way.state_on_host else None
        self.stepper = Stepper(optimizer, home)
        several = way.micro_batches > 1 or way.resident is not None
        self.is_layer_major = way.in_backward and several
        if not self.is_layer_major:
            checkpoint_blocks(self.model)
        if way.in_backward and not self.is_layer_major:
            register_steps(self.model, self.stepper)
        loader = work.loader(len(self.model.output_weight), packed=True)
        self._batches = [batch.to(device) for batch in loader.epoch(0)]

    def group(self, number: int) -> list[Batch]:
        """Return the micro-batches of a step; the batches come again and again."""
        count = self.way.micro_batches
        indexes = range(number * count, (number + 1) * count)
        return [self._batches[i % len(self._batches)] for i in indexes]

    def step(self, number: int) -> None:
        """Make one optimizer step, as the recipe does without clipping."""
        model, stepper, host, group = self.model, self.stepper, self.host, self.group(number)
        num_targets = sum(batch.num_targets for batch in group)
        if self.is_layer_major:
            layer_major_step(model, self.loss_fn, stepper, group, num_targets, clip=None, host=host)
            return
        embedded: list[tuple[Tensor, Tensor | None]] = []
        for batch in group:
            x_BSD = model.embed(batch.tokens_BS).requires_grad_()
            context = model.context(batch.positions_BS, batch.segments_BM)
            around = {}
            if self.way.offloading:
                keep = (*model.parameters(), *context.tensors(), x_BSD)
                around = {"around_block": offload_activations(host, keep=keep)}
            hidden_BSD = model.hidden_states(x_BSD, context, **around)
            loss = self.loss_fn(hidden_BSD, model.output_weight, batch, num_targets)
            if self.way.in_backward:
                step_in_backward(model, stepper, batch, x_BSD, loss, host=host)
                return
            loss.backward()
            embedded.append((batch.tokens_BS, x_BSD.grad))
        model.add_embedding_gradient(embedded)
        stepper.step(model.parameters())
        stepper.optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
