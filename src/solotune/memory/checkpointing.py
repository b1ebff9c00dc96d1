"""Activation checkpointing: keep each block's input, compute the rest again in backward.

Saves:    all activations but one block input a block, (B, S, D) each, and one block's own.
Costs:    a second forward, about a third more time.
Excludes: nothing.
Label:    bit-exact. Figures: docs/activation_checkpointing.md
"""

from solotune.models import Block, Decoder


def checkpoint_blocks(model: Decoder) -> None:
    """Set checkpointing on every block; parameter names do not change."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.checkpointing = True
