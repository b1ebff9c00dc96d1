"""Activation checkpointing: keep each block's input, compute the rest again in backward.

Saves:    all activations but one block input a block, (B, S, D) each, and one block's own.
Costs:    a second forward, about a third more time; selective: less of both.
Excludes: nothing.
Label:    bit-exact. Figures: docs/activation_checkpointing.md
"""

from typing import Literal

import torch

from solotune.errors import ConfigError
from solotune.models import Block, Decoder


def checkpoint_blocks(model: Decoder, *, option: int | Literal["op"] | None = None) -> None:
    """Set checkpointing on blocks; parameter names do not change.

    `option` None: every block is recomputed whole. A number k: every k-th block, the others keep
    their activations. "op": every block keeps the output of its attention and recomputes the rest.
    """
    if isinstance(option, int) and option < 1:
        raise ConfigError(f"ac_option={option}: use 1 or more blocks, or op")
    every = option if isinstance(option, int) else 1
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        block.checkpointing = (index + 1) % every == 0
        if option == "op":
            block.kept_outputs = (torch.ops.solotune.segment_attention.default,)
