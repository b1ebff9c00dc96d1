"""Rotary position embedding: the angles in fp32, whatever the dtype of the weights.

Shapes: B batch, S tokens, H heads, K head width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from solotune.errors import CheckpointError


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_type`, `rope_theta` and scaling fields from either spelling of config.json.

    Newer folders hold `rope_parameters`; older ones `rope_theta` beside `rope_scaling`, whose type
    is called `rope_type` or `type`.
    """
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings["rope_type"] = settings.get("rope_type") or settings.pop("type", None) or "default"
    for field, otherwise in (
        ("rope_theta", config.get("rope_theta") or 10000.0),
        ("original_max_position_embeddings", config.get("max_position_embeddings")),
    ):
        if settings.get(field) is None:
            settings[field] = otherwise
    return settings


# rope_type -> the fields without which it means nothing
_REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}


class Rotary(nn.Module):
    """Angles of the rotary embedding for given positions.

    `settings` is what `rope_settings` returns. The frequencies are recomputed at each call, from
    numbers alone: a model built on the meta device has no buffer to fill.

    Raises CheckpointError for a scaling that is not implemented or lacks a field.
    Source: RoFormer (2104.09864); scalings: linear (2306.15595), YaRN (2309.00071), and the
    low/high-frequency interpolation of Llama 3.1.
    """

    def __init__(self, head_dim: int, settings: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.settings = settings
        kind, rotated_share = settings["rope_type"], settings.get("partial_rotary_factor")
        if kind not in _REQUIRED_FIELDS:
            raise CheckpointError(
                f"config.json: rope_type {kind!r} is not supported; "
                f"supported: {', '.join(_REQUIRED_FIELDS)}"
            )
        for field in _REQUIRED_FIELDS[kind]:
            if settings.get(field) is None:
                raise CheckpointError(f"config.json: rope_type {kind!r} lacks the field {field!r}")
        if rotated_share not in (None, 1):
            raise CheckpointError(
                f"config.json: partial_rotary_factor={rotated_share} is not supported, only 1"
            )

    def forward(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos_BSK and sin_BSK in fp32, the two halves of K alike."""
        inv_freq, magnitude = self._frequencies(positions_BS.device)
        angles_BSK = (positions_BS.float().unsqueeze(-1) * inv_freq).repeat(1, 1, 2)
        return angles_BSK.cos() * magnitude, angles_BSK.sin() * magnitude

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Return the K/2 inverse frequencies and the factor on cos and sin."""
        s, width = self.settings, self.head_dim
        exponent = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
        inv_freq = 1.0 / s["rope_theta"] ** exponent
        match s["rope_type"]:
            case "linear":
                return inv_freq / s["factor"], 1.0
            case "llama3":
                return _llama3(inv_freq, s), 1.0
            case "yarn":
                return _yarn(inv_freq, s, width)
        return inv_freq, 1.0


def _llama3(inv_freq: Tensor, s: dict[str, Any]) -> Tensor:
    """Divide long wavelengths by `factor`, keep short ones, interpolate between."""
    turns = s["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / s["factor"])


def _yarn(inv_freq: Tensor, s: dict[str, Any], width: int) -> tuple[Tensor, float]:
    """Interpolate the dimensions that turn rarely over the original length; scale cos and sin."""
    original, factor = s["original_max_position_embeddings"], s["factor"]

    def dimension(turns: float) -> float:  # whose wavelength fits `turns` times into the original
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(s["rope_theta"]))

    low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # no division by zero
    index = torch.arange(width // 2, device=inv_freq.device, dtype=torch.float32)
    interpolate = ((index - low) / (high - low)).clamp(0, 1)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = s.get("attention_factor")
    if attention_factor is None:
        if s.get("mscale") and s.get("mscale_all_dim"):
            attention_factor = magnitude(s["mscale"]) / magnitude(s["mscale_all_dim"])
        else:
            attention_factor = magnitude(1.0)
    return inv_freq * (1 - interpolate) + inv_freq / factor * interpolate, attention_factor


def rotate(x_BSHK: Tensor, cos_BSK: Tensor, sin_BSK: Tensor) -> Tensor:
    """Return `x` turned by its position's angles; the product is fp32, the result has x's dtype."""
    first, second = x_BSHK.chunk(2, dim=-1)
    turned_BSHK = torch.cat((-second, first), dim=-1)
    rotated_BSHK = x_BSHK * cos_BSK.unsqueeze(2) + turned_BSHK * sin_BSK.unsqueeze(2)
    return rotated_BSHK.to(x_BSHK.dtype)
