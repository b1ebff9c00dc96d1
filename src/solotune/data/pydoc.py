"""Instruct rows from docstrings of Python's standard library: real English, no download."""

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated, Any, Literal

from solotune.config.fitting import Minimum
from solotune.data.dataset import build_samples
from solotune.data.files import Row
from solotune.data.samples import Batching, SampleSet, row_hash
from solotune.data.tokenizing import Rules
from solotune.tokenizers import Tokenizer

Split = Literal["train", "validation", "all"]

# Modules that import everywhere and without side effects.
MODULES = """
abc argparse array ast asyncio base64 bdb binascii bisect builtins bz2 calendar cmath cmd code
codecs codeop collections collections.abc colorsys compileall concurrent.futures configparser
contextlib contextvars copy copyreg csv ctypes dataclasses datetime decimal difflib dis doctest
email email.header email.message email.policy email.utils enum errno fileinput filecmp fnmatch
fractions ftplib functools gc getopt getpass gettext glob graphlib gzip hashlib heapq hmac html
html.parser http http.client http.cookies http.server imaplib importlib importlib.metadata
importlib.resources importlib.util inspect io ipaddress itertools json keyword linecache locale
logging logging.handlers lzma mailbox marshal math mimetypes multiprocessing netrc numbers
operator optparse os os.path pathlib pdb pickle pickletools pkgutil platform plistlib poplib
pprint profile pstats pyclbr py_compile queue quopri random re reprlib rlcompleter runpy sched
secrets selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3 ssl stat
statistics string stringprep struct subprocess symtable sys sysconfig tabnanny tarfile tempfile
textwrap threading time timeit token tokenize trace traceback tracemalloc types typing unicodedata
unittest unittest.mock urllib.error urllib.parse urllib.request urllib.robotparser uuid venv
warnings wave weakref webbrowser wsgiref.headers wsgiref.util xml.dom.minidom
xml.etree.ElementTree xml.sax.saxutils xmlrpc.client zipapp zipfile zipimport zlib zoneinfo
"""

_PHRASINGS = (
    "What does `{name}` do in Python?",
    "Explain `{name}` from Python's standard library.",
    "What is `{name}` for?",
    "Describe the {kind} `{name}`.",
    "In Python, what does the {kind} `{name}` do?",
    "I found `{name}` in a program. What does it do?",
)
_REPLACED = ("inspect.getfile",)  # by torch, once it is imported
_VALIDATION_SHARE = 0.05
_SHORTEST = 20  # characters of an answer
_LONGEST = 1200


def pydoc_dataset(
    tokenizer: Tokenizer,
    *,
    split: Split = "train",
    packed: bool = True,
    max_rows: Annotated[int, Minimum(1)] | None = None,
    train_on_input: bool = False,
) -> SampleSet:
    """Questions about the functions, classes and methods of Python's standard library.

    `split`: train | validation | all; one row in twenty, by the hash of its answer, is for
    validation. The rows and their order depend on the Python version, build and platform alone.
    """
    return build_samples(
        tokenizer,
        _rows(split),
        source=f"docstrings of Python's standard library, split {split}",
        rules=Rules(format="prompt", train_on_input=train_on_input),
        batching=Batching(packed=packed),
        max_rows=max_rows,
    )


def _rows(split: Split) -> Iterator[Row]:
    """The rows of a split, in an order that mixes the modules."""
    answers: dict[str, tuple[str, str]] = {}
    with warnings.catch_warnings():  # of names that a later Python removes
        warnings.simplefilter("ignore", DeprecationWarning)
        things = list(_things())
    for name, kind, thing in things:
        answer = _answer(thing)
        if answer is not None and answer not in answers:  # inherited docstrings come once
            phrasing = _PHRASINGS[row_hash("phrasing", name) % len(_PHRASINGS)]
            answers[answer] = (name, phrasing.format(name=name, kind=kind))
    for answer in sorted(answers, key=row_hash):
        name, question = answers[answer]
        is_validation = row_hash("split", answer) < _VALIDATION_SHARE * 2**64
        if split == "all" or is_validation == (split == "validation"):
            yield Row(f"docstring of {name}", {"prompt": question, "completion": answer})


def _things() -> Iterator[tuple[str, str, Any]]:
    """(qualified name, kind, object) of each public function, class and method by module."""
    seen: set[int] = set()
    for module_name in MODULES.split():
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # built without it (sqlite3, lzma), or removed since
            continue
        yield module_name, "module", module
        for name, thing in _public(module):
            if id(thing) in seen or not (inspect.isclass(thing) or inspect.isroutine(thing)):
                continue
            seen.add(id(thing))
            full_name = name if module_name == "builtins" else f"{module_name}.{name}"
            if full_name in _REPLACED or not _is_of_the_library(thing):
                continue
            yield full_name, "class" if inspect.isclass(thing) else "function", thing
            if inspect.isclass(thing):
                for method_name, method in sorted(vars(thing).items()):
                    method = getattr(method, "__func__", method)
                    is_public = not method_name.startswith("_") and inspect.isroutine(method)
                    if is_public and _is_of_the_library(method):
                        yield f"{full_name}.{method_name}", "method", method


def _public(module: ModuleType) -> list[tuple[str, Any]]:
    """What a module offers: `__all__`, or its public names that were defined in it."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name in vars(module)
            if getattr(getattr(module, name), "__module__", None) == module.__name__
        ]
    return [(name, getattr(module, name)) for name in sorted(names) if _is_public(module, name)]


def _is_public(module: ModuleType, name: str) -> bool:
    return not name.startswith("_") and hasattr(
        module, name
    )  # __all__ also names submodules not imported yet


def _is_of_the_library(thing: Any) -> bool:
    """False for what other packages put into its modules and classes when they are imported."""
    module = getattr(thing, "__module__", None)  # methods written in C have none
    return not isinstance(module, str) or module.partition(".")[0] in sys.stdlib_module_names


def _answer(thing: Any) -> str | None:
    """The first paragraphs of a docstring that are sentences, each on one line, or None."""
    doc = inspect.getdoc(thing) if isinstance(getattr(thing, "__doc__", None), str) else None
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", doc or ""):
        text = " ".join(paragraph.split())
        if not _is_prose(text):
            if kept:
                break
            continue  # a signature stands before the first sentence
        if len(kept) == 2 or sum(map(len, kept)) + len(text) > _LONGEST:
            break
        kept.append(text)
    answer = "\n\n".join(kept)
    return answer if len(answer) >= _SHORTEST else None


def _is_prose(text: str) -> bool:
    return (
        bool(re.match(r"[A-Z`'\"(]", text))
        and text.endswith((".", "!", "?", ":", ")"))
        and ">>>" not in text
    )
