"""The settings of an adapter: the `adapter:` node of a config."""

import math
from dataclasses import dataclass
from typing import Literal

from solotune.errors import ConfigError

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A low-rank addition to frozen weights: W + alpha / rank * B A.

    `targets` are names of layers (`q_proj`, `layers.3.mlp.down_proj`, `embed_tokens`, `lm_head`),
    or one regular expression over whole names; `all-linear`, alone or in the list, is every linear
    layer of the blocks. `layers_to_transform` are numbers of blocks, from 0; what lies outside the
    blocks is adapted wherever it is named. `source` is the folder of an adapter to go on from.

    Raises ConfigError for a value that no model could take. Sources: LoRA (2106.09685),
    rsLoRA (2312.03732): alpha / sqrt(rank), DoRA (2402.09353).
    """

    rank: int = 16
    alpha: float = 32.0
    targets: list[str] | str = ALL_LINEAR
    layers_to_transform: list[int] | int | None = None
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    dtype: Literal["bf16", "fp32"] = "fp32"
    source: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"adapter.rank={self.rank}: use 1 or more")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ConfigError(f"adapter.alpha={self.alpha}: use a number above 0, often 2 * rank")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"adapter.dropout={self.dropout}: use 0 or more, and less than 1")
        if self.dtype not in ("bf16", "fp32"):
            raise ConfigError(f"adapter.dtype={self.dtype}: use fp32 or bf16")
        if not self.targets:
            raise ConfigError("adapter.targets is empty: name layers, or use all-linear")
        if self.layers_to_transform == []:
            raise ConfigError("adapter.layers_to_transform=[]: name blocks, or use null for all")

    @property
    def scaling(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
