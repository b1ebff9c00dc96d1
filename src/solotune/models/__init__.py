"""Decoders: shared parts, one file a family, named builders and `auto`."""
