"""A tiny model with everything that one optimizer step needs, in every schedule of the recipe."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from solotune.data.batch import Batch
from solotune.losses import LinearCrossEntropy
from solotune.memory import (
    HostMemory,
    StateHome,
    Stepper,
    StreamedLayers,
    checkpoint_blocks,
    is_layer_major,
    layer_major_step,
    offload_activations,
    register_steps,
    step_in_backward,
)
from solotune.models import Decoder
from solotune.training import clip_grad_norm, set_dtype
from tests.models.tiny import make_batch, tiny

LAYERS, WIDTH, VOCAB = 4, 128, 1000

# The recipe's keys that decide the peak, at values without any memory feature.
NOTHING_ON: dict[str, Any] = {
    "log_memory": True,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "clip_grad_norm": 1.0,
    "enable_activation_checkpointing": False,
    "ac_mode": "full",
    "ac_option": None,
    "enable_activation_offloading": False,
    "optimizer_in_bwd": False,
    "activation_offload_to": "host",
    "optimizer_state": "device",
    "resident_layers": None,
    "on_nonfinite": "stop",
}
CHECKPOINTING: dict[str, Any] = {"enable_activation_checkpointing": True}
OFFLOADING: dict[str, Any] = CHECKPOINTING | {"enable_activation_offloading": True}
IN_BACKWARD: dict[str, Any] = {"optimizer_in_bwd": True, "clip_grad_norm": None}
LAYER_MAJOR: dict[str, Any] = {
    "optimizer_in_bwd": True,
    "clip_grad_norm": None,
    "gradient_accumulation_steps": 3,
}
CLIPPED: dict[str, Any] = LAYER_MAJOR | {"clip_grad_norm": 1.0}


class OneStep:
    """Steps a model as the recipe does under the values of `on`."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        optimizer: type[Optimizer] = torch.optim.AdamW,
        folder: Path | None = None,
        poison: bool = False,
        shape: dict[str, Any] | None = None,
        rows: tuple[tuple[int, ...], ...] = ((100, 60, 30), (150, 20)),
        **on: Any,
    ) -> None:
        self.on = NOTHING_ON | on
        fields = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
        fields |= {"intermediate_size": 256} | (shape or {})
        self.model: Decoder = set_dtype(tiny(**fields), dtype)
        self.layer_major = is_layer_major(self.on)
        if self.on["enable_activation_checkpointing"]:
            checkpoint_blocks(self.model, option=self.on["ac_option"])
        layers = StreamedLayers(self.model, resident=self.on["resident_layers"])
        self.host = HostMemory(torch.device("cpu"), weights=layers, poison=poison)
        self.loss_fn = LinearCrossEntropy(chunk_tokens=64)
        made = optimizer(self.model.parameters(), lr=1e-3)  # type: ignore[call-arg]
        away = self.on["optimizer_state"] != "device"
        home = StateHome(made, host=self.host, folder=folder) if away else None
        self.stepper = Stepper(made, home)
        if self.on["optimizer_in_bwd"] and not self.layer_major:
            register_steps(self.model, self.stepper)
        count = self.on["gradient_accumulation_steps"]
        self.group = [make_batch(*rows, vocab=VOCAB, seed=seed) for seed in range(count)]

    def forward(self, batch: Batch, num_targets: int) -> tuple[Tensor, Tensor]:
        model, around = self.model, {}
        x_BSD = model.embed(batch.tokens_BS).requires_grad_()
        context = model.context(batch.positions_BS, batch.segments_BM)
        if self.on["enable_activation_offloading"]:
            keep = (*model.parameters(), *context.tensors(), x_BSD)
            around = {"around_block": offload_activations(self.host, keep=keep)}
        hidden_BSD = model.hidden_states(x_BSD, context, **around)
        return x_BSD, self.loss_fn(hidden_BSD, model.output_weight, batch, num_targets)

    def __call__(self) -> None:
        model, stepper, host = self.model, self.stepper, self.host
        num_targets, clip = sum(b.num_targets for b in self.group), self.on["clip_grad_norm"]
        if self.layer_major:
            layer_major_step(
                model, self.loss_fn, stepper, self.group, num_targets, clip=clip, host=host
            )
            return
        if self.on["optimizer_in_bwd"]:
            x_BSD, loss = self.forward(self.group[0], num_targets)
            step_in_backward(model, stepper, self.group[0], x_BSD, loss, host=host)
            return
        embedded = []
        for batch in self.group:
            x_BSD, loss = self.forward(batch, num_targets)
            loss.backward()
            embedded.append((batch.tokens_BS, x_BSD.grad))
        model.add_embedding_gradient(embedded)
        clip_grad_norm(model.parameters(), clip)
        stepper.step(model.parameters())
        stepper.optimizer.zero_grad(set_to_none=True)
