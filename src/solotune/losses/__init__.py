"""Losses that take hidden states and the output weight."""

from solotune.losses.linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
