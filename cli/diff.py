"""`tune diff`: what a copy changes of its original."""

import difflib
import hashlib
import sys
from pathlib import Path

from solotune.config.command_line import Parser
from solotune.config.registry import find_either
from solotune.errors import UsageError, UserError

from .cp import read_stamp

HELP = """\
Show what a copy changes of the installed original, as a unified diff.

  tune diff mine.py
  tune diff mine.yaml llama3_2/1B_full_single_device

The first line that `tune cp` writes names the original; a file without it needs the name. The exit
code is that of diff: 0 where they are equal, 1 where they differ, 2 where one cannot be read."""


def main(words: list[str]) -> int:
    """Print the difference; return 0 where there is none, 1 where there is one."""
    parser = Parser(prog="tune diff", description=HELP)
    parser.add_argument("copy", type=Path, help="a file that `tune cp` made")
    parser.add_argument("name", nargs="?", help="the original, by name or path")
    options = parser.parse_args(words)
    try:
        copy = options.copy.expanduser().read_text(encoding="utf-8")
        stamp = read_stamp(copy)
        name = options.name or (stamp.name if stamp else None)
        if name is None:
            raise UsageError(
                f"{options.copy} does not say what it is a copy of: name the original,"
                f" tune diff {options.copy} NAME"
            )
        original = find_either(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{options.copy} is not UTF-8 text: save it as UTF-8") from None
    except UserError as error:
        raise UsageError(str(error)) from None  # 1 says that the files differ

    if stamp:
        copy = copy.partition("\n")[2]
        digest = hashlib.sha256(original.encode()).hexdigest()
        if name == stamp.name and not digest.startswith(stamp.digest):
            print(
                f"{name} is no longer what it was in {stamp.version}, when {options.copy} was "
                "copied: the lines below hold both changes",
                file=sys.stderr,
            )
    lines = difflib.unified_diff(
        _lines(original), _lines(copy), fromfile=name, tofile=str(options.copy), lineterm=""
    )
    differs = False
    for line in lines:
        differs = True
        print(line)
    return int(differs)


def _lines(text: str) -> list[str]:
    """Return the lines of a text; one that no newline ends says so, as diff does."""
    lines = text.split("\n")
    if lines[-1]:
        return [*lines[:-1], f"{lines[-1]}\n\\ No newline at end of file"]
    return lines[:-1]
