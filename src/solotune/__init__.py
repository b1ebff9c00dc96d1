"""Fine-tune language models on one device that is too small for it."""

__version__ = "0.1.0"
