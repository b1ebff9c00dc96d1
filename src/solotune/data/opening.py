"""Bytes and text of data files: unpacked, and with the place of what is not text."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from solotune.errors import DataError

COMPRESSIONS = (".gz", ".zst")
_CHUNK = 1 << 20  # bytes
_BOM = codecs.BOM_UTF8

# How files begin that are something else than their name says, with what to do.
_MAGICS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the data: run git lfs pull",
    codecs.BOM_UTF16_LE: 'is UTF-16 (Windows calls it "Unicode"): save it as UTF-8',
    codecs.BOM_UTF16_BE: "is UTF-16: save it as UTF-8",
    b"\x1f\x8b": "is packed with gzip: end its name with .gz",
    b"\x28\xb5\x2f\xfd": "is packed with zstd: end its name with .zst",
    b"PK\x03\x04": "is a zip or Excel file: unpack it, or save it as csv",
    b"PAR1": "is a parquet file: end its name with .parquet",
}


def data_suffix(path: Path) -> str:
    """The suffix of a file in lower case, that of a packed file without `.gz` or `.zst`."""
    name = path.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return Path(name).suffix


@contextmanager
def open_data(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked as they are read.

    Raises DataError where the file, read inside the block, ends too early or is damaged.
    """
    try:
        with _open(path) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        if error.errno is None and path.suffix.lower() in COMPRESSIONS:  # pyarrow's
            raise _damaged(path, error) from None
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        import pyarrow  # heavy, and only here

        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
        return io.BufferedReader(stream, _CHUNK)
    return path.open("rb")


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is cut off or damaged ({error}): download or pack it again")


def check_magic(path: Path, start: bytes) -> None:
    """Raise DataError where the first bytes of a text file tell of another kind of file."""
    for magic, what in _MAGICS.items():
        if start.startswith(magic):
            raise DataError(f"{path} {what}")
    if b"\0" in start:
        raise DataError(f"{path} is not text (it holds NUL bytes): save it as UTF-8")


def byte_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number (from 1), offset in bytes and content of each line, without a byte order mark.

    Lines end at LF only: a text may hold U+2028.
    """
    offset = 0
    with open_data(path) as file:
        for number, line in enumerate(file, start=1):
            size = len(line)
            if number == 1:
                check_magic(path, line[:4096])
                line = line.removeprefix(_BOM)
            yield number, offset + size - len(line), line
            offset += size


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines as text. Raises DataError with the line and byte that is not UTF-8."""
    for number, offset, line in byte_lines(path):
        try:
            yield number, line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: {not_utf8(offset + error.start)}") from None


def text_chunks(path: Path) -> Iterator[str]:
    """The text in pieces of about a MiB. Raises DataError with the line that is not UTF-8."""
    line, offset, pending = 1, 0, b""
    with open_data(path) as file:
        data = file.read(_CHUNK)
        check_magic(path, data[:4096])
        if data.startswith(_BOM):
            data, offset = data.removeprefix(_BOM), len(_BOM)
        decoder = codecs.getincrementaldecoder("utf-8")()
        while True:
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += (pending + data).count(b"\n", 0, error.start)
                where = offset - len(pending) + error.start
                raise DataError(f"{path}, line {line}: {not_utf8(where)}") from None
            if text:
                yield text
            if not data:
                return
            line, offset, pending = (
                line + text.count("\n"),
                offset + len(data),
                decoder.getstate()[0],
            )
            data = file.read(_CHUNK)


def not_utf8(offset: int) -> str:
    """What to say of a byte that is not UTF-8, at its offset in the file."""
    return f"not UTF-8 at byte {offset} of the file; save it as UTF-8"
