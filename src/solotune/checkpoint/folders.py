"""Folders and small files that appear complete or not at all.

Everything unfinished lies beside its target under a hidden name, so that a killed run leaves only
names that `clean_up` knows:

    .writing-X    not complete: deleted
    .replaced-X   the old X while a new one takes its place: put back if there is no X, else deleted
    .removing-X   no longer wanted: deleted
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from solotune.errors import CheckpointError

WRITING, REPLACED, REMOVING = ".writing-", ".replaced-", ".removing-"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `target`, durably and at once, when the block ends.

    An error in the block removes it and leaves an older `target` as it was; an OSError becomes a
    CheckpointError.
    """
    writing = target.with_name(WRITING + target.name)
    try:
        if writing.exists():
            shutil.rmtree(writing)
        writing.mkdir(parents=True)
        yield writing
        for folder, _, names in os.walk(writing):
            for name in names:
                _sync_file(Path(folder, name))
            sync_folder(Path(folder))
        _put_in_place(writing, target)
    except OSError as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(f"cannot write {target}: {_reason(error)}") from error
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a small text file: a reader sees the old text or the new, also after a power cut."""
    writing = path.with_name(WRITING + path.name)
    try:
        writing.write_text(text, encoding="utf-8")
        _sync_file(writing)
        writing.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {_reason(error)}") from error


def remove(folder: Path, *, parent: Path) -> None:
    """Delete a folder if it exists; moved to `parent` first, it is never seen half-deleted."""
    if not folder.exists():
        return
    hidden = parent / (REMOVING + folder.name)
    if hidden.exists():
        shutil.rmtree(hidden)
    folder.replace(hidden)
    shutil.rmtree(hidden)


def clean_up(parent: Path) -> None:
    """Finish or undo what a killed run left in `parent`."""
    for path in sorted(parent.glob(".*-*")):
        target = path.with_name(path.name.partition("-")[2])
        if path.name.startswith(REPLACED) and not target.exists():
            path.replace(target)
        elif path.name.startswith((WRITING, REPLACED, REMOVING)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def model_folder(path: str | Path, *, key: str = "checkpoint_dir") -> Path:
    """Return the folder with the weights: `path`, or for a run folder the step that `latest` names.

    Raises CheckpointError, which names the config `key`, if there is no such folder.
    """
    path = Path(path)
    if not path.is_dir():
        fault = "is a file, not a folder" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{key}={path} {fault}: name a Hugging Face model folder or a run folder"
        )
    pointer = path / "latest"
    if pointer.is_file() and not (path / "config.json").is_file():
        return pointed_folder(pointer)
    return path


def pointed_folder(pointer: Path) -> Path:
    """Return the step folder that a file `latest` or `best` names."""
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {pointer}: {error}") from error
    if re.fullmatch(r"step_\d+", name):  # never a path that leads elsewhere
        for folder in (pointer.parent / name, pointer.parent / (REPLACED + name)):
            if folder.is_dir():
                return folder
    raise CheckpointError(
        f"{pointer} names {name!r}, which is no step folder beside it: write into it the name of "
        "one that exists"
    )


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    if os.name == "nt":  # Windows cannot open a folder, and journals its names itself
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(writing: Path, target: Path) -> None:
    replaced = target.with_name(REPLACED + target.name)
    if replaced.exists():
        shutil.rmtree(replaced)
    # A folder cannot be renamed over a full one, so there is a moment with neither; `clean_up`
    # and `pointed_folder` know where the old one is.
    had_old = target.exists()
    if had_old:
        target.replace(replaced)
    try:
        writing.replace(target)
    except OSError:
        if had_old:
            replaced.replace(target)
        raise
    sync_folder(target.parent)
    if had_old:
        shutil.rmtree(replaced)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _reason(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)
