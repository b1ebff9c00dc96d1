"""Entry point of `tune`: picks the verb."""

import atexit
import gc
import importlib
import sys

from solotune import __version__
from solotune.config.exit_code import exit_code
from solotune.config.suggest import suggest
from solotune.errors import UsageError

atexit.register(gc.freeze)  # Python's last collection takes a second, and frees nothing of use

VERBS = {
    "run": "train, or generate: run a recipe with a config",
    "sweep": "run a recipe once for each combination of values, and compare",
    "plan": "say what a run needs, and find a configuration that fits",
    "merge": "write a model with an adapter in its weights",
    "validate": "check a config without reading any weights",
    "inspect": "show what a run is fed with, and what it trains",
    "ls": "list the recipes and their configs",
    "cat": "print a recipe or a config",
    "cp": "copy a recipe or a config, to change it",
    "diff": "show what a copy changes of its original",
    "download": "fetch a model from the Hugging Face Hub",
    "convert-config": "write a config of torchtune as one of solotune",
    "env": "print versions, devices and memory, for a report of a fault",
    "completion": "make a shell complete recipes, configs and keys",
}

USAGE = """\
usage: tune VERB ...

Fine-tune language models on one device that is too small for it.

{verbs}

Start with
  tune ls
  tune run full_finetune_single_device --config smollm2/135M_full_single_device --help

`tune VERB --help` explains a verb. `python -m solotune` is the same command."""


def main(words: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 (error), 2 (usage), 130 (Ctrl-C)."""
    words = sys.argv[1:] if words is None else words
    return exit_code(lambda: _dispatch(words), words)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        verbs = "\n".join(f"  {verb:<{width}}  {what}" for verb, what in VERBS.items())
        print(USAGE.format(verbs=verbs))
        return 0
    if words[0] in ("-V", "--version"):
        print(f"solotune {__version__}")
        return 0
    if words[0] not in VERBS:
        guess = suggest(words[0], VERBS) or f": the verbs are {', '.join(VERBS)}"
        raise UsageError(f"tune has no verb {words[0]}{guess}")
    # only the verb's own module, so that `tune ls` never pays for what `tune run` needs
    verb = importlib.import_module(f"solotune.cli.{words[0].replace('-', '_')}")
    return verb.main(words[1:])
