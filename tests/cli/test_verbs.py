"""Every verb: its help costs nothing, and the page of the command has a line for it."""

import subprocess
import sys
from pathlib import Path

from solotune.cli.main import VERBS  # pyright: ignore[reportMissingImports]

HELP_OF_ALL = """
import sys
for slow in ("torch", "huggingface_hub", "transformers", "datasets"):
    sys.modules[slow] = None  # an import fails
from solotune.cli.main import VERBS, main
for words in [*([verb] for verb in VERBS), ["inspect", "data"], ["inspect", "model"]]:
    try:
        code = main([*words, "--help"])
    except SystemExit as end:
        code = end.code
    assert not code, words
"""


def test_the_help_of_every_verb_imports_nothing_slow():
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert f"usage: tune {verb}" in done.stdout


def test_the_page_of_the_command_has_a_line_for_every_verb():
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text("utf-8")
    for verb in VERBS:
        assert f"| `tune {verb}" in page, verb
