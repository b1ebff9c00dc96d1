"""YAML configs, one folder a model family."""
