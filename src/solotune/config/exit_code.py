"""How a command ends: its exit code, and a user's mistake as one sentence."""

import errno
import io
import logging
import sys
import traceback
from collections.abc import Callable, Sequence

from solotune.errors import UsageError, UserError

_SENTENCES = {
    errno.ENOSPC: "no space left on the disk: free some, or set output_dir to another disk",
    errno.EDQUOT: "the disk quota is used up: free some, or set output_dir to another disk",
    errno.EFBIG: "a file would grow over the limit of this system: see `ulimit -f`",
    errno.EACCES: "permission denied: check the owner and the mode of the file or folder",
    errno.EPERM: "operation not permitted: check the owner and the mode of the file or folder",
    errno.EROFS: "the file system is read-only: set output_dir to another one",
    errno.ENOENT: "no such file or folder: check the path",
    errno.EISDIR: "this is a folder, a file is needed",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EIO: "the disk reports an input/output error",
}

# Importing torchao and bitsandbytes warns of kernels made for other machines than this one, and of
# a deprecation between torchao and torch: nothing that a user of ours can act on.
_NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes")


def exit_code(run: Callable[[], int], words: Sequence[str]) -> int:
    """Return what `run` returns, or 1 (error), 2 (usage), 130 (Ctrl-C) after one sentence.

    `words` are those of the command line: `--debug` among them shows tracebacks, and what libraries
    log while they are imported.
    """
    debug = "--debug" in words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's is none
            stream.reconfigure(errors="backslashreplace")  # cp1252 has no arrow, and no emoji
    if not debug:
        silence_imports()
    try:
        return run()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `tune cat ... | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise  # a fault of ours: the traceback is what helps
        if debug:
            traceback.print_exc()
        print(f"error: {sentence}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def silence_imports() -> None:
    """Drop what libraries log while they are imported, errors excepted."""
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _sentence(error: Exception) -> str | None:
    """Return what a user can do about the error, or None where it is a fault of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        what = _SENTENCES.get(error.errno or 0, error.strerror or str(error))
        return f"{error.filename}: {what}" if error.filename else what
    # torch raises RuntimeError for both kinds of memory; it is told by name, so as not to import it
    if type(error).__name__ == "OutOfMemoryError":
        return "the device memory is used up: lower batch_size or tokenizer.max_seq_len"
    # "can't allocate memory" on Linux, "not enough memory" on Windows
    if isinstance(error, MemoryError) or "DefaultCPUAllocator:" in str(error):
        return "the host memory is used up: lower batch_size or tokenizer.max_seq_len"
    return None
