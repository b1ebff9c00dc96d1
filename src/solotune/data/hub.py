"""Rows of a data set of the Hugging Face Hub, through the `datasets` library."""

from collections.abc import Iterator
from typing import Any

from solotune.data.files import Row, without_nulls
from solotune.errors import DataError

_LONGEST_SAID = 300  # characters of a message of the library


def hub_rows(
    name: str,
    *,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    key: str = "dataset.source",
) -> Iterator[Row]:
    """The rows of the split (`train` where it is None) of the data set `name`, `owner/name`.

    Without `streaming` the library downloads the files once and keeps a memory-mapped copy. Raises
    DataError, naming the config `key`, for what is not there or cannot be reached.
    """
    import datasets  # heavy, and only here

    split = split or "train"
    number = 0
    try:
        rows: Any = datasets.load_dataset(
            name, config, split=split, revision=revision, streaming=streaming
        )
        for number, columns in enumerate(rows, start=1):
            yield Row(f"{name}, split {split}, row {number}", without_nulls(columns))
    except Exception as error:  # the library, its readers and the network raise all kinds
        where = f"after row {number}: " if number else ""
        raise DataError(f"{key}={name}: {where}{_explain(error, key)}") from None


def _explain(error: Exception, key: str) -> str:
    from datasets.exceptions import DatasetNotFoundError

    node = key.rpartition(".")[0]
    said = " ".join(str(error).split()).partition(" Example of usage")[0] or type(error).__name__
    said = said if len(said) <= _LONGEST_SAID else f"{said[:_LONGEST_SAID]} ..."
    if isinstance(error, ConnectionError):
        return (
            f"no such file or folder, and the Hub cannot be reached ({said}): go online once to "
            "download it, or give a local file"
        )
    if isinstance(error, DatasetNotFoundError):
        return (
            f"no such file or folder, and not on the Hub either, or not for everyone ({said}): "
            "check the name, or set HF_TOKEN to a token that may read it"
        )
    if "config" in said.lower():
        return f"{said} (choose with {node}.config)"
    if "split" in said.lower():
        return f"{said} (choose with {node}.split)"
    return said
