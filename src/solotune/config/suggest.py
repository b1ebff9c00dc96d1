"""The word that a misspelt one was probably meant to be."""

import difflib
from collections.abc import Iterable


def suggest(name: str, candidates: Iterable[str], *, prefix: str = "") -> str:
    """Return `; did you mean PREFIX+CANDIDATE?`, or an empty text where no candidate is alike.

    A dotted candidate is also found by its last word: `lr` finds `optimizer.lr`.
    """
    candidates = list(candidates)
    by_last_word = {c.rpartition(".")[2]: c for c in reversed(candidates)}
    if name in by_last_word:
        return f"; did you mean {prefix}{by_last_word[name]}?"
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{found[0]}?" if found else ""
