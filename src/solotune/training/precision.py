"""Which dtype a parameter is held in."""

from collections import Counter
from typing import TypeVar

import torch
from torch import nn

from solotune.errors import ConfigError

Model = TypeVar("Model", bound=nn.Module)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that a `dtype` key names; raises ConfigError where it would not train."""
    if name not in DTYPES:
        hint = " (fp16 weights underflow without a loss scaler)" if name == "fp16" else ""
        raise ConfigError(f"dtype={name}{hint}: use dtype={' or dtype='.join(DTYPES)}")
    if name == "bf16" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise ConfigError(
                f"dtype=bf16: {torch.cuda.get_device_name(device)} (compute capability "
                f"{major}.{minor}) only emulates it, several times slower: use dtype=fp32, "
                "or a card of compute capability 8.0 or newer"
            )
    return DTYPES[name]


def autocast_to_bf16(device: torch.device, *, dtype: torch.dtype, enabled: bool) -> torch.autocast:
    """Return what to enter around a step so that fp32 weights are multiplied in bf16.

    Casts are not kept: one of all weights would be half as large as they are. Raises ConfigError
    where weights are bf16 anyhow.
    """
    if enabled and dtype != torch.float32:
        raise ConfigError("autocast=True has no effect on bf16 weights: set dtype=fp32 too")
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def set_dtype(model: Model, dtype: torch.dtype) -> Model:
    """Give matrices `dtype` and one-dimensional parameters fp32; returns the model.

    Half a bf16 step at 1.0 is 2e-3: no usual learning rate ever moves a norm in bf16. They are
    0.003 % of the weights. Call it while the model is on meta: no memory moves.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():  # a weight in 4 bits is bytes
            target = torch.float32 if parameter.dim() == 1 else dtype
            parameter.data = parameter.data.to(target)
    return model


def parameter_lines(model: nn.Module) -> list[str]:
    """Return one printed line for each dtype and device: how many tensors and parameters.

    Of weights in 4 bits it is how many bytes.
    """
    tensors: Counter[tuple[str, str]] = Counter()
    numbers: Counter[tuple[str, str]] = Counter()
    for parameter in model.parameters():
        kind = (str(parameter.dtype).removeprefix("torch."), str(parameter.device))
        tensors[kind] += 1
        numbers[kind] += parameter.numel()
    return [
        f"{numbers[kind]:>15,} {'bytes' if kind[0] == 'uint8' else 'parameters'} in "
        f"{tensors[kind]} tensors, {kind[0]} on {kind[1]}"
        for kind, _ in numbers.most_common()
    ]
