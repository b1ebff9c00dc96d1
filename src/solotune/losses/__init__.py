"""Losses that take hidden states and the output weight, so that the logits never exist at once."""
