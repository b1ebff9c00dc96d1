"""The errors that a user can repair; the command prints them as one sentence."""


class UserError(Exception):
    """A fault of input or environment; its message names the key, file or row, and the repair."""


class ConfigError(UserError):
    """A key, a value or a combination of keys that cannot be run."""


class UsageError(ConfigError):
    """A command line that does not follow the grammar; the command exits with 2."""


class DataError(UserError):
    """A data set that cannot be read or holds nothing to train on."""


class CheckpointError(UserError):
    """A model folder or training state that cannot be read or written."""


class TrainingError(UserError):
    """A step whose numbers cannot be trained on."""
