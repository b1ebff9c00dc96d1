"""Learning-rate schedules: pure functions of the step, and the one place that writes the rate."""

import math
from collections.abc import Callable

import torch

from solotune.errors import ConfigError

Schedule = Callable[[int], float]  # step, counted from 1 -> factor on the optimizer's lr


def cosine(
    total_steps: int,
    *,
    num_warmup_steps: int | None = None,
    warmup_ratio: float = 0.03,
    final_lr_ratio: float = 0.1,
) -> Schedule:
    """Warm up linearly, then half a cosine from 1 down to `final_lr_ratio` at the last step."""

    def shape(progress: float) -> float:
        return final_lr_ratio + (1 - final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return _with_warmup(total_steps, num_warmup_steps, warmup_ratio, shape)


def linear(
    total_steps: int,
    *,
    num_warmup_steps: int | None = None,
    warmup_ratio: float = 0.03,
    final_lr_ratio: float = 0.0,
) -> Schedule:
    """Warm up linearly, then fall linearly from 1 to `final_lr_ratio` at the last step."""
    return _with_warmup(
        total_steps,
        num_warmup_steps,
        warmup_ratio,
        lambda progress: 1 - (1 - final_lr_ratio) * progress,
    )


def constant(
    total_steps: int, *, num_warmup_steps: int | None = None, warmup_ratio: float = 0.0
) -> Schedule:
    """Warm up linearly, then stay at 1."""
    return _with_warmup(total_steps, num_warmup_steps, warmup_ratio, lambda progress: 1.0)


def _with_warmup(
    total_steps: int,
    num_warmup_steps: int | None,
    warmup_ratio: float,
    shape: Callable[[float], float],
) -> Schedule:
    """Warmup over 10 steps to 1e-3 takes 1e-4 first and reaches 1e-3 at step 10.

    `num_warmup_steps` (optimizer steps) wins over `warmup_ratio` (of the total).
    """
    if not 0 <= warmup_ratio <= 1:
        raise ConfigError(f"lr_scheduler.warmup_ratio={warmup_ratio}: use a value from 0 to 1")
    warmup = num_warmup_steps
    if warmup is None:
        warmup = min(math.ceil(warmup_ratio * total_steps), total_steps - 1)
    elif warmup < 0:
        raise ConfigError(f"lr_scheduler.num_warmup_steps={warmup}: use 0 or more")
    elif warmup > total_steps:
        print(
            f"warning: lr_scheduler.num_warmup_steps={warmup} is more than the run's {total_steps} "
            "steps: the learning rate never reaches optimizer.lr"
        )

    def factor(step: int) -> float:
        if step <= warmup:
            return step / warmup
        if total_steps - warmup <= 1:
            return shape(0.0)
        return shape(min((step - warmup - 1) / (total_steps - warmup - 1), 1.0))

    return factor


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Write factor * (each group's configured lr) into the groups that step; return the first.

    Some optimizers hold the rate as a tensor and refuse a float (torchao), others would turn a
    tensor into a host read (bitsandbytes): each keeps the kind it was built with.
    """
    for group in optimizer.param_groups:
        base = group.setdefault("initial_lr", float(group["lr"]))
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(base * factor)
        else:
            group["lr"] = base * factor
    return optimizer.param_groups[0]["initial_lr"] * factor
