"""Entry point of `tune`: picks the verb, turns a user's mistake into one sentence."""

import errno
import importlib
import sys
import traceback

from solotune import __version__
from solotune.errors import UsageError, UserError

VERBS = {
    "run": "train, or generate: run a recipe with a config",
    "ls": "list the recipes and their configs",
    "cat": "print a recipe or a config",
    "cp": "copy a recipe or a config, to change it",
    "validate": "check a config without reading any weights",
}

USAGE = """\
usage: tune VERB ...

Fine-tune language models on one device that is too small for it.

{verbs}

Start with
  tune ls
  tune run full_finetune_single_device --config smollm2/135M_full_single_device --help

`tune VERB --help` explains a verb. `python -m solotune` is the same command."""

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


def main(words: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 (error), 2 (usage), 130 (Ctrl-C)."""
    words = sys.argv[1:] if words is None else words
    try:
        return _dispatch(words)
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
        if "--debug" in words:
            traceback.print_exc()
        print(f"error: {sentence}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


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
        from solotune.config.suggest import suggest

        guess = suggest(words[0], VERBS) or f": the verbs are {', '.join(VERBS)}"
        raise UsageError(f"tune has no verb {words[0]}{guess}")
    # only the verb's own module, so that `tune ls` never pays for what `tune run` needs
    verb = importlib.import_module(f"solotune.cli.{words[0]}")
    return verb.main(words[1:])


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
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in str(error):
        return "the host memory is used up: lower batch_size or tokenizer.max_seq_len"
    return None
