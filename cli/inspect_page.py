"""The page of `tune inspect data --html`: one file without scripts, with nothing to load."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from .inspect_data import count_table

if TYPE_CHECKING:
    from solotune.data import Counts, FedRow
    from solotune.tokenizers import Tokenizer

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --soft: #6a6f76; --line: #d9dce0;
  --trained: #c9efd0; --token: #0002; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #16181b; --soft: #9aa0a6;
  --line: #33373c; --trained: #1d5a2c; --token: #fff2; } }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
ul { color: var(--soft); padding-left: 1.2rem; }
table { border-collapse: collapse; } td { padding: .1rem .8rem .1rem 0; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: #4a8fd6; height: .8rem; }
.sample { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .6rem .8rem;
  font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.sample span { border-right: 1px solid var(--token); }
.t { background: var(--trained); } .m { color: var(--soft); }
.f { color: var(--soft); font-style: italic; }
"""


def page(
    title: str,
    facts: list[str],
    counts: "Counts",
    rows: list["FedRow"],
    tokenizer: "Tokenizer",
) -> str:
    """Return the page: counts, lengths, and each row token by token."""
    return "\n".join(_lines(title, facts, counts, rows, tokenizer)) + "\n"


def _lines(
    title: str,
    facts: list[str],
    counts: "Counts",
    rows: list["FedRow"],
    tokenizer: "Tokenizer",
) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{escape(title)}</h1>\n<h2>Counts</h2>\n<table>"
    for what, value in count_table(counts):
        yield f'<tr><td class="n">{escape(value)}</td><td>{escape(what)}</td></tr>'
    yield "</table>\n<h2>Samples by length in tokens</h2>\n<table>"
    most = max(entry["samples"] for entry in counts.histogram)
    for entry in counts.histogram:
        width = 30 * entry["samples"] / most
        yield (
            f'<tr><td class="n">{entry["from"]} to {entry["to"]}</td><td class="n">'
            f'{entry["samples"]:,}</td><td><div class="bar" style="width: {width:.2f}rem"></div>'
            "</td></tr>"
        )
    yield "</table>\n<h2>What a run prints about them</h2>\n<ul>"
    yield from (f"<li>{escape(fact)}</li>" for fact in facts)
    yield "</ul>\n<h2>Rows</h2>"
    yield (
        '<p><span class="t">trained</span> <span class="m">masked</span>; point at a token to'
        " see its number</p>"
    )
    for number, row in enumerate(rows):
        samples = "1 sample" if len(row.segments) == 1 else f"{len(row.segments)} samples"
        yield f"<h2>Row {number}: {len(row.tokens):,} tokens, {samples}</h2>"
        for start, end in row.spans():
            spans = _token_spans(row, start, end, tokenizer)
            yield f'<div class="sample">{"".join(spans)}</div>'
        if row.num_filler:
            yield f'<p class="f">{row.num_filler:,} filler tokens</p>'
    yield "</body>\n</html>"


def _token_spans(row: "FedRow", start: int, end: int, tokenizer: "Tokenizer") -> Iterator[str]:
    from solotune.data.inspection import pieces

    at = start
    for count, text in pieces(tokenizer, row.tokens[start:end]):
        ids = ", ".join(map(str, row.tokens[at : at + count]))
        kind = "t" if row.labels[at] >= 0 else "m"
        yield f'<span class="{kind}" title="{ids}">{escape(_visible(text))}</span>'
        at += count


def _visible(text: str) -> str:
    """Return the text with its white space and controls to be seen."""
    shown = text.replace("\n", "\u21b5\n").replace("\t", "\u21e5\t")
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in shown
    )
