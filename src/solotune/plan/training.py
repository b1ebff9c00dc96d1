"""A recipe's step outside its `main`: set up by the recipe's own functions, on any weights."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solotune.data import Batch
from solotune.memory.host import HostMemory
from solotune.memory.stepping import Stepper
from solotune.models import Decoder
from solotune.training import autocast_to_bf16
from solotune.training.precision import DTYPES


class Training:
    """What a recipe sets up for its steps.

    `fill` puts memory behind the model's parameters, which are on meta. `around_setup` is entered
    where the recipe allocates on the device.
    """

    def __init__(
        self,
        recipe: Any,
        cfg: Any,
        *,
        device: torch.device,
        folder: Path,
        output_dir: Path,
        fill: Callable[[Decoder], None],
        around_setup: Callable[[], Any] = nullcontext,
    ) -> None:
        self._recipe = recipe
        self._offered: dict[str, Any] = {
            "cfg": cfg, "device": device, "folder": folder, "output_dir": output_dir,
            "dtype": DTYPES[cfg.dtype],
        }  # fmt: skip
        self.model: Decoder = self._call("setup_model", gives="model")
        fill(self.model)
        with around_setup():
            self.host: HostMemory = self._call("setup_host", gives="host")
        self.stepper: Stepper = self._call("setup_optimizer", gives="stepper")
        self.loss_fn: nn.Module = cfg.loss.build(soft_cap=self.model.logit_soft_cap)
        self._offered["loss_fn"] = self.loss_fn
        self._autocast = autocast_to_bf16(
            device, dtype=DTYPES[cfg.dtype], enabled=getattr(cfg, "autocast", False)
        )

    def step(self, group: list[Batch]) -> None:
        """Make one optimizer step over a group of micro-batches."""
        with self._autocast:
            self._call("train_step", group=group)

    def _call(self, name: str, *, gives: str | None = None, **more: Any) -> Any:
        """Call a function of the recipe with what it has parameters for."""
        function, values = getattr(self._recipe, name), self._offered | more
        parameters = inspect.signature(function).parameters
        result = function(**{name: values[name] for name in parameters})
        if gives is not None:
            self._offered[gives] = result
        return result


def fill_parameters(model: Decoder, make: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Put a tensor behind each parameter on meta, and memory behind the buffers."""
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in filled:  # two modules may share one
                tensor = make(parameter)
                filled[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            module.register_parameter(name, filled[parameter])
