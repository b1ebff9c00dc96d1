"""Optimizers of our own, and parameter groups; the rest come from torch, torchao, bitsandbytes."""

from solotune.optim.adamw_kahan import AdamWKahan as AdamWKahan
from solotune.optim.groups import decay_groups as decay_groups
from solotune.optim.lion_kahan import LionKahan as LionKahan
