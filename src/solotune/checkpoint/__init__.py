"""Weights streamed in and out of Hugging Face folders, and exact resume."""
