"""The `tune` command, one file a verb."""
