"""torch.compile, one block at a time.

Saves:    the temporaries of elementwise operations, and time.
Costs:    tens of seconds at the first step.
Excludes: nothing; with checkpointing the recomputation is inside the compiled block.
Label:    reordered. Figures: docs/compile.md
"""

from solotune.models import Decoder


def compile_blocks(model: Decoder) -> None:
    """Compile every block in place; blocks of one shape share the compiled code."""
    for block in model.blocks:
        block.compile()
