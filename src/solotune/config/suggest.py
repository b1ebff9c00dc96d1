"""The word that a misspelt one was probably meant to be."""

import difflib
from collections.abc import Iterable


def suggest(name: str, candidates: Iterable[str], *, prefix: str = "") -> str:
    """Return `; did you mean PREFIX+CANDIDATE?`, or an empty text where no candidate is alike.

    A dotted candidate is also found by its last word, whatever the case: `lr` finds `optimizer.lr`.
    """
    candidates = list(candidates)
    by_last_word = {c.rpartition(".")[2].lower(): c for c in reversed(candidates)}
    if name.lower() in by_last_word:
        return f"; did you mean {prefix}{by_last_word[name.lower()]}?"
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if not found:
        near = difflib.get_close_matches(name.lower(), by_last_word, n=1)
        found = [by_last_word[word] for word in near]
    return f"; did you mean {prefix}{found[0]}?" if found else ""
