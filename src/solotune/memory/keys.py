"""The keys of a recipe that decide the memory peak, and which of them go together."""

from collections.abc import Mapping
from typing import Any

from solotune.errors import ConfigError

# Beside them `log_memory`, which shows the peak.
MEMORY_KEYS = (
    "log_memory batch_size gradient_accumulation_steps clip_grad_norm "
    "enable_activation_checkpointing ac_mode ac_option enable_activation_offloading "
    "activation_offload_to optimizer_in_bwd optimizer_state resident_layers on_nonfinite"
).split()


def is_layer_major(on: Mapping[str, Any]) -> bool:
    """Whether these values ask for the layer-major schedule."""
    several = on["gradient_accumulation_steps"] > 1
    streams = on["resident_layers"] is not None
    return on["optimizer_in_bwd"] and (several or streams or on["clip_grad_norm"] is not None)


def check_memory_keys(on: Mapping[str, Any]) -> None:
    """Raise ConfigError where values of MEMORY_KEYS exclude each other or have no effect."""
    layer_major = is_layer_major(on)
    offloads = on["enable_activation_offloading"] or layer_major
    if on["activation_offload_to"] == "disk" and not offloads:
        raise ConfigError(
            "activation_offload_to=disk has no effect: set enable_activation_offloading=True"
        )
    mode, option = on["ac_mode"], on["ac_option"]
    if (mode == "selective") != (option is not None):
        raise ConfigError(
            f"ac_mode={mode} with ac_option={option}: set ac_mode=selective and ac_option to a "
            "number of blocks or to op, or neither"
        )
    if mode == "selective" and (layer_major or not on["enable_activation_checkpointing"]):
        raise ConfigError(
            "ac_mode=selective needs enable_activation_checkpointing=True, and has no effect where "
            "optimizer_in_bwd meets accumulation, clipping or resident_layers (full "
            "checkpointing): use ac_mode=full"
        )
    if (resident := on["resident_layers"]) is not None:
        if resident < 0:
            raise ConfigError(f"resident_layers={resident}: use 0 or more, or null for all")
        if not on["optimizer_in_bwd"]:
            raise ConfigError(
                f"resident_layers={resident} streams weights in the layer-major schedule, where "
                "each is needed twice a step: set optimizer_in_bwd=True, or resident_layers=null"
            )
    in_backward = on["optimizer_in_bwd"] and on["clip_grad_norm"] is None
    if on["on_nonfinite"] == "skip" and in_backward:
        raise ConfigError(
            "on_nonfinite=skip cannot hold steps back that happen inside backward: set "
            "clip_grad_norm, or on_nonfinite=stop"
        )
