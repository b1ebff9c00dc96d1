"""Typed, strict configuration: dataclass <- YAML <- key=value."""
