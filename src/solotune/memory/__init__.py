"""Memory features: one file each, with what it saves, costs and excludes in its first lines."""

from solotune.memory.checkpointing import checkpoint_blocks as checkpoint_blocks
from solotune.memory.compile import compile_blocks as compile_blocks
from solotune.memory.disk import Disk as Disk
from solotune.memory.host import HostMemory as HostMemory
from solotune.memory.keys import MEMORY_KEYS as MEMORY_KEYS
from solotune.memory.keys import check_memory_keys as check_memory_keys
from solotune.memory.keys import is_layer_major as is_layer_major
from solotune.memory.layer_major import LAYER_MAJOR_FACT as LAYER_MAJOR_FACT
from solotune.memory.layer_major import layer_major_step as layer_major_step
from solotune.memory.offload import offload_activations as offload_activations
from solotune.memory.optimizer_in_backward import register_steps as register_steps
from solotune.memory.optimizer_in_backward import step_in_backward as step_in_backward
from solotune.memory.optimizer_state import StateHome as StateHome
from solotune.memory.optimizer_state import state_home as state_home
from solotune.memory.report import MemoryReport as MemoryReport
from solotune.memory.resident_layers import StreamedLayers as StreamedLayers
from solotune.memory.stepping import Stepper as Stepper
