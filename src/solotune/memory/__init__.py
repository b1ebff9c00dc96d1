"""Memory features: one file each, with what it saves, costs and excludes in its first lines."""

from solotune.memory.checkpointing import checkpoint_blocks as checkpoint_blocks
from solotune.memory.compile import compile_blocks as compile_blocks
from solotune.memory.host import HostMemory as HostMemory
