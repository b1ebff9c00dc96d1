"""The scripts that users run, copy and change."""
