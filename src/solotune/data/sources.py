"""Where rows come from: a file, a folder, a glob, or a data set of the Hugging Face Hub."""

import glob
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from solotune.config.suggest import suggest
from solotune.data.files import READERS, Row, file_rows
from solotune.data.hub import hub_rows
from solotune.data.opening import COMPRESSIONS, data_suffix
from solotune.errors import ConfigError, DataError

_KINDS = "jsonl, json, csv, tsv, txt or parquet"
_KIND_OF = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".tsv": "csv"}
# Words in names of files that set rows apart from the training ones.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    "test": "test",
}
_NOT_DATA = re.compile(r"(dataset_infos?|dataset_dict|state)\.json|(readme|license)\b.*", re.I)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def read_rows(
    source: str | Path,
    *,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    key: str = "dataset.source",
) -> Iterator[Row]:
    """An iterator of the rows of a file, all files of a folder or glob, or a Hub data set.

    Rows that cannot be parsed carry a `fault`. `split` chooses files of a folder by their names,
    or a split of a Hub data set (`train` where it is None); `config` and `revision` are the Hub's;
    with `streaming` its rows are not stored on disk. Raises DataError, which names the config
    `key`, where files or a whole file cannot be read, and ConfigError for an argument without
    effect.
    """
    if is_hub_name(source):
        return hub_rows(
            str(source), config=config, split=split, revision=revision, streaming=streaming, key=key
        )
    node = key.rpartition(".")[0]
    for name, value in (("config", config), ("revision", revision)):
        if value is not None:
            raise ConfigError(
                f"{node}.{name}={value} chooses a part of a Hub data set, and {source} is a local "
                "path: remove the key"
            )
    files = data_files(source, split=split, key=key)
    return chain.from_iterable(map(file_rows, files))


def source_name(
    source: str, *, config: str | None = None, split: str | None = None, revision: str | None = None
) -> str:
    """The source and what is read of it, for people: `data (2 files)`, `owner/name (split test)`.

    Raises what `data_files` raises.
    """
    if is_hub_name(source):
        parts = {"config": config, "split": split or "train", "revision": revision}
        chosen = ", ".join(f"{name} {value}" for name, value in parts.items() if value)
        return f"{source} ({chosen})"
    files = data_files(source, split=split)
    return source if len(files) == 1 else f"{source} ({len(files)} files)"


def is_hub_name(source: str | Path) -> bool:
    """Whether `source` is `owner/name` of the Hub: a path that is there always wins.

    So does one that lacks only its suffix: `data/chats` beside data/chats.jsonl is a mistake.
    """
    text = str(source)
    return (
        isinstance(source, str)
        and _HUB_NAME.fullmatch(text) is not None
        and data_suffix(Path(text)) not in READERS
        and not Path(text).exists()
        and not any(Path(text).parent.glob(f"{Path(text).name}.*"))
    )


def data_files(
    source: str | Path, *, split: str | None = None, key: str = "dataset.source"
) -> list[Path]:
    """The files of a path, folder or glob, in the order of their names.

    Raises DataError, naming the config `key`, where there is none, where a folder holds files of
    several kinds or splits, or where a file would be read twice.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = _files_of_folder(path, split=split, key=key)
    elif split is not None:
        node = key.rpartition(".")[0]
        raise ConfigError(
            f"{node}.split={split} chooses files of a folder or a part of a Hub data set, and "
            f"{source} is neither: remove the key"
        )
    elif path.exists():
        files = [path]
    else:
        # Path.glob takes no absolute pattern, and finds hidden files
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207
        files = [Path(name) for name in sorted(names)]
        files = [file for file in files if file.is_file()]
        if not files:
            raise DataError(f"{key}={source}: {_not_found(path)}")
    for file in files:
        if data_suffix(file) not in READERS:
            raise DataError(
                f"{key}={source}: {file.name} is not a {_KINDS} file (perhaps .gz or .zst): "
                "convert it to one of them"
            )
    _refuse_twice(files, f"{key}={source}")
    return files


def _not_found(path: Path) -> str:
    if glob.has_magic(str(path)):
        return "no file has such a name"
    beside = [file.name for file in path.parent.glob("*")] if path.parent.is_dir() else []
    guess = suggest(path.name, beside, prefix=f"{path.parent}/" if str(path.parent) != "." else "")
    return (
        f"no such file{guess}; give the path of a {_KINDS} file, of a folder of them, a glob, or "
        "a Hub name (owner/name)"
    )


def _files_of_folder(folder: Path, *, split: str | None, key: str) -> list[Path]:
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in inside if path.is_file() and _is_data(path)]
    if not files:
        raise DataError(f"{key}={folder}: {_no_data(folder, inside)}")
    by_split = {path: _split_of(path) for path in files}
    splits = sorted({name for name in by_split.values() if name})
    if split is not None:
        wanted = _SPLITS.get(split, split)
        files = [path for path in files if by_split[path] == wanted or split in _words(path)]
        if not files:
            names = ", ".join(path.name for path in by_split)
            raise DataError(
                f"{key.rpartition('.')[0]}.split={split}: no file of {folder} has the word in its "
                f"name ({_shortened(names)})"
            )
    elif len(splits) > 1:
        node = key.rpartition(".")[0]
        choose = f"set {node}.split to one of them, or " if node else ""
        raise DataError(
            f"{key}={folder} holds files of several splits ({', '.join(splits)}): {choose}name a "
            "file or a glob"
        )
    kinds = {data_suffix(path) for path in files}
    if len({_KIND_OF.get(kind, kind) for kind in kinds}) > 1:
        raise DataError(
            f"{key}={folder} holds files of several kinds ({', '.join(sorted(kinds))}): name those "
            f"to read with a glob, as {folder}/*{min(kinds)}"
        )
    return files


def _is_data(path: Path) -> bool:
    return data_suffix(path) in READERS and not _NOT_DATA.fullmatch(path.name)


def _no_data(folder: Path, inside: Sequence[Path]) -> str:
    if any(path.suffix == ".arrow" for path in folder.glob("**/*.arrow")):
        return (
            "a folder of datasets' save_to_disk: write it with to_parquet or to_json and name "
            "that file"
        )
    below = next((path for path in sorted(folder.rglob("*")) if _is_data(path)), None)
    if below is not None:
        return f"the folder holds no data file itself, but {below}: name that folder, or a glob"
    names = ", ".join(path.name for path in inside) or "nothing"
    return f"the folder holds no {_KINDS} file (it holds {_shortened(names)})"


def _words(path: Path) -> list[str]:
    return re.split(r"[^a-z0-9]+", path.name.lower())


def _split_of(path: Path) -> str | None:
    return next((_SPLITS[word] for word in _words(path) if word in _SPLITS), None)


def _refuse_twice(files: Sequence[Path], what: str) -> None:
    """Raise DataError where two names are one file, or one file is there packed and unpacked."""
    seen: dict[object, Path] = {}
    for file in files:
        unpacked = file.with_suffix("") if file.suffix.lower() in COMPRESSIONS else file
        for same in (file.resolve(), unpacked.absolute()):
            if seen.setdefault(same, file) is not file:
                raise DataError(
                    f"{what}: {seen[same].name} and {file.name} are the same rows twice: keep one, "
                    "or name one"
                )


def _shortened(names: str) -> str:
    return names if len(names) <= 100 else f"{names[:100]}..."
