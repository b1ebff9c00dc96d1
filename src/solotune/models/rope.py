"""Rotary position embedding: the angles in fp32, whatever the dtype of the weights.

Shapes: B batch, S tokens, H heads, K head width, of which P rotated, M segments a row.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solotune.errors import CheckpointError

# rope_type -> the fields without which it means nothing, and those it may have
_FIELDS: dict[str, tuple[str, str]] = {
    "default": ("", ""),
    "linear": ("factor", ""),
    "llama3": ("factor low_freq_factor high_freq_factor original_max_position_embeddings", ""),
    "yarn": (
        "factor original_max_position_embeddings",
        "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    ),
    "longrope": (
        "short_factor long_factor original_max_position_embeddings factor",
        "attention_factor",
    ),
}


def rope_settings(
    given: Any,
    *,
    theta: float,
    max_positions: int | None,
    original_positions: int | None = None,
    rotated_share: float | None = None,
    more: str = "",
) -> dict[str, Any]:
    """Return `rope_type`, `rope_theta` and what else counts of `given`, a config's rope dictionary.

    The arguments are what stands beside the dictionary: `theta` and `rotated_share` count where it
    has none, `original_positions` before its own. `more` names further fields that the family
    reads. Raises CheckpointError for a scaling that is not implemented or lacks a field.
    """
    if not (given is None or isinstance(given, Mapping)):
        raise CheckpointError(f"config.json: rope settings {given!r} are no object: fetch it again")
    given = given or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _FIELDS:
        raise CheckpointError(
            f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(_FIELDS)}"
        )
    settings = {"rope_type": kind, "rope_theta": given.get("rope_theta") or theta}
    required, optional = (names.split() for names in _FIELDS[kind])
    values = dict(given)
    if original_positions is not None:
        values["original_max_position_embeddings"] = original_positions
    original = values.get("original_max_position_embeddings") or max_positions
    values["original_max_position_embeddings"] = original
    if kind == "longrope" and values.get("factor") is None and max_positions and original:
        values["factor"] = max_positions / original
    for field in (*required, *optional, *more.split()):
        if values.get(field) is not None:
            settings[field] = values[field]
        elif field in required:
            raise CheckpointError(f"config.json: rope_type {kind!r} lacks the field {field!r}")
    share = given.get("partial_rotary_factor") or rotated_share
    if share not in (None, 1):
        settings["partial_rotary_factor"] = share
    for field, value in settings.items():
        if not _fits(field, value):
            raise CheckpointError(
                f"config.json: {field}={value!r} of the rope settings is no value for it: fetch "
                "the file again"
            )
    return settings


def _fits(field: str, value: Any) -> bool:
    """Whether a rope setting can be computed with."""
    match field:
        case "rope_type":
            return True
        case "truncate":
            return isinstance(value, bool)
        case "short_factor" | "long_factor":
            return isinstance(value, list) and all(_fits("", factor) for factor in value)
        case "mscale" | "mscale_all_dim" | "llama_4_scaling_beta":
            return type(value) in (int, float)
    return type(value) in (int, float) and value > 0


class Angles(NamedTuple):
    """What turns the queries and keys of a batch."""

    cos_BSP: Tensor
    sin_BSP: Tensor
    query_scale_BS: Tensor | None = None


class Rotary(nn.Module):
    """Angles of the rotary embedding for given positions.

    `settings` is what `rope_settings` returns. The frequencies are recomputed at each call, from
    numbers alone: a model built on the meta device has no buffer to fill.

    Source: RoFormer (2104.09864); scalings: linear (2306.15595), YaRN (2309.00071), LongRoPE
    (2402.13753), and the low/high-frequency interpolation of Llama 3.1.
    """

    def __init__(self, head_dim: int, settings: dict[str, Any]) -> None:
        super().__init__()
        self.width = int(head_dim * settings.get("partial_rotary_factor", 1))
        self.settings = settings
        self.by_length = settings["rope_type"] == "longrope"
        self._longrope_factors: dict[torch.device, Tensor] = {}
        for field in ("short_factor", "long_factor"):
            factors = settings.get(field)
            if factors is not None and len(factors) != self.width // 2:
                raise CheckpointError(
                    f"config.json: {field} has {len(factors)} numbers where {self.width} rotated "
                    f"dimensions need {self.width // 2}: fetch the file again"
                )

    def forward(self, positions_BS: Tensor, lengths_BS: Tensor | None = None) -> Angles:
        """Return cos and sin in fp32, the two halves of P alike.

        `lengths_BS`, which LongRoPE asks for, is how long the sequence around each position is.
        """
        if self.by_length:
            assert lengths_BS is not None
            inv_freq, magnitude = self._longrope(lengths_BS)
        else:
            inv_freq, magnitude = self._frequencies(positions_BS.device)
        angles_BSP = (positions_BS.float().unsqueeze(-1) * inv_freq).repeat(1, 1, 2)
        cos_BSP, sin_BSP = angles_BSP.cos() * magnitude, angles_BSP.sin() * magnitude
        return Angles(cos_BSP, sin_BSP, self._query_scale(positions_BS))

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Return the P/2 inverse frequencies and the factor on cos and sin."""
        s = self.settings
        inv_freq = 1.0 / self._wavelengths(device)
        match s["rope_type"]:
            case "linear":
                return inv_freq / s["factor"], 1.0
            case "llama3":
                return _llama3(inv_freq, s), 1.0
            case "yarn":
                return _yarn(inv_freq, s, self.width)
        return inv_freq, 1.0

    def _longrope(self, lengths_BS: Tensor) -> tuple[Tensor, float]:
        """Return frequencies for each position: other ones in sequences beyond the original length.

        Another length in the batch changes nothing for a sequence.
        """
        s, device = self.settings, lengths_BS.device
        if device not in self._longrope_factors:  # once: lists reach a card by a copy that waits
            factors = [s["short_factor"], s["long_factor"]]
            self._longrope_factors[device] = torch.tensor(factors, device=device)
        short, long = 1.0 / (self._longrope_factors[device] * self._wavelengths(device))
        is_long_BS1 = (lengths_BS > s["original_max_position_embeddings"]).unsqueeze(-1)
        return torch.where(is_long_BS1, long, short), _longrope_magnitude(s)

    def _wavelengths(self, device: torch.device) -> Tensor:
        exponent = torch.arange(0, self.width, 2, device=device, dtype=torch.float32) / self.width
        return self.settings["rope_theta"] ** exponent

    def _query_scale(self, positions_BS: Tensor) -> Tensor | None:
        """Return how much sharper a query attends far behind the original length (Llama 4)."""
        beta = self.settings.get("llama_4_scaling_beta")
        if beta is None:
            return None
        original = self.settings["original_max_position_embeddings"]
        return 1 + beta * torch.log1p(torch.floor(positions_BS / original))


def sequence_lengths(segments_BM: Tensor, tokens: int) -> Tensor:
    """Return for each of B x `tokens` positions how long its segment is, 0 for filler."""
    position_BS = torch.arange(tokens, device=segments_BM.device).repeat(len(segments_BM), 1)
    segment_BS = torch.searchsorted(segments_BM.cumsum(1), position_BS, right=True)
    return F.pad(segments_BM, (0, 1)).gather(1, segment_BS)


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


def _longrope_magnitude(s: dict[str, Any]) -> float:
    if s.get("attention_factor") is not None:
        return s["attention_factor"]
    if s["factor"] <= 1:
        return 1.0
    return math.sqrt(1 + math.log(s["factor"]) / math.log(s["original_max_position_embeddings"]))


def rotate(x_BSHK: Tensor, cos_BSP: Tensor, sin_BSP: Tensor) -> Tensor:
    """Return `x` turned by its position's angles; the product is fp32, the result has x's dtype.

    Where P is less than K, the rest of each head stays as it is.
    """
    width = cos_BSP.size(-1)
    if width < x_BSHK.size(-1):
        turned_BSHP = rotate(x_BSHK[..., :width], cos_BSP, sin_BSP)
        return torch.cat((turned_BSHP, x_BSHK[..., width:]), dim=-1)
    first, second = x_BSHK.chunk(2, dim=-1)
    turned_BSHK = torch.cat((-second, first), dim=-1)
    rotated_BSHK = x_BSHK * cos_BSP.unsqueeze(2) + turned_BSHK * sin_BSP.unsqueeze(2)
    return rotated_BSHK.to(x_BSHK.dtype)
