"""`tune cp`: copy a recipe or a config, to change it."""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from solotune import __version__
from solotune.config.command_line import Parser
from solotune.config.registry import find_either
from solotune.errors import UserError

HELP = """\
Copy a recipe or a config, by name or path, to a file or a folder of yours.

  tune cp full_finetune_single_device mine.py
  tune cp llama3_2/1B_full_single_device mine.yaml
  tune run mine.py --config mine.yaml

The first line of the copy says what it is a copy of, with version and hash, so that you can see
later what changed. The copy runs from any folder; modules beside it may be named in its configs."""

STAMP = "# solotune "
_STAMP_LINE = re.compile(r"# solotune (\S+) (.+) sha256:([0-9a-f]+)")


class Stamp(NamedTuple):
    """What the first line of a copy says: version, name and start of the hash of the original."""

    version: str
    name: str
    digest: str


def main(words: list[str]) -> int:
    """Copy the file of that name, with a stamp in its first line."""
    parser = Parser(prog="tune cp", description=HELP)
    parser.add_argument("name", help="a recipe or a config, by name or path")
    parser.add_argument("target", type=Path, help="the file or folder to copy to")
    parser.add_argument("--force", action="store_true", help="overwrite the target")
    options = parser.parse_args(words)

    source = find_either(options.name)
    target = options.target.expanduser()
    if target.is_dir():
        target = target / source.name
    elif not target.suffix:
        target = target.with_suffix(source.suffix)
    if target.suffix != source.suffix:
        raise UserError(f"{target}: {options.name} is a {source.suffix} file: end the target so")
    if target.exists() and not options.force:
        raise UserError(f"{target} exists: choose another name, or --force overwrites it")
    text = source.read_text(encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not text.startswith(STAMP):  # the copy of a copy keeps the name of the original
        text = f"{stamp(options.name, text)}\n{text}"
    target.write_text(text, encoding="utf-8", newline="\n")
    print(target)
    return 0


def stamp(name: str, text: str) -> str:
    """Return the first line of a copy; `tune run` reads from it which configs fit the copy."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{STAMP}{__version__} {name} sha256:{digest[:16]}"


def read_stamp(text: str) -> Stamp | None:
    """Return what the first line of a copy says of its original, None where it says nothing."""
    match = _STAMP_LINE.match(text)
    return Stamp(*match.groups()) if match else None
