"""Model folders and resume state, in and out, tensor by tensor."""

from solotune.checkpoint.adapter import add_adapter, inject_stored, load_adapter
from solotune.checkpoint.checkpointer import Checkpointer
from solotune.checkpoint.folders import model_folder
from solotune.checkpoint.four_bit import stored_four_bit
from solotune.checkpoint.load import LoadReport, load_weights
from solotune.checkpoint.stored_adapter import open_adapter
from solotune.checkpoint.training_state import environment_changes, resume_lines

__all__ = [
    "Checkpointer",
    "LoadReport",
    "add_adapter",
    "environment_changes",
    "inject_stored",
    "load_adapter",
    "load_weights",
    "model_folder",
    "open_adapter",
    "resume_lines",
    "stored_four_bit",
]
