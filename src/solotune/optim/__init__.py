"""Parameter groups and the optimizers that torch, torchao and bitsandbytes do not have."""
