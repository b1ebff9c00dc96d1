"""`tune inspect data`: the rows that a run is fed, what is trained of them, and counts."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby, islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from solotune.config import located
from solotune.config.command_line import Parser
from solotune.errors import UserError

from .inspect import parse, setup

if TYPE_CHECKING:  # torch is slow to import, and --help needs none
    from solotune.data import Counts, FedRow, SampleSet
    from solotune.tokenizers import Tokenizer

HELP = """\
Show the rows that `tune run` would be fed, in its order, with what is trained of them.

  tune inspect data smollm2/135M_full_single_device dataset=chats.jsonl
  tune inspect data mine.yaml --samples 20 --html page.html

Trained tokens are green, masked ones plain, filler is counted. Without colours (NO_COLOR, or a
pipe) what is trained stands in {+ and +}. With --json each row is one object (tokens, labels with
-100 where no token is trained, segments) and the last object holds the counts."""

GREEN, DIM, END = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"
_BAR = 40  # characters of the longest bar
_END_TOKENS = 30  # of an example


def main(words: list[str]) -> int:
    """Print rows and counts, or write them as a page."""
    parser = Parser(prog="tune inspect data", description=HELP)
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="rows shown (3)")
    parser.add_argument("--validation", action="store_true", help="the validation set instead")
    parser.add_argument("--json", action="store_true", help="one object a row, then the counts")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    options, recipe = parse(parser, words, what="data")
    if options.samples < 0:
        parser.error(f"--samples {options.samples}: use 0 or more")
    module, cfg = setup(recipe, options, needs="setup_data")

    out = sys.stdout
    # what libraries print is no JSON
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        show(cfg, module, options, title=options.config or recipe.stem, out=out)
    return 0


def show(
    cfg: Any, module: ModuleType, options: argparse.Namespace, *, title: str, out: TextIO
) -> None:
    """Build what `module`, a recipe, feeds and show it as the options say."""
    import torch

    from solotune.checkpoint import model_folder
    from solotune.data import count_samples, fed_rows
    from solotune.data.inspection import as_json

    with located(cfg):
        folder = model_folder(cfg.checkpoint_dir)
        model = module.setup_model(cfg, folder, torch.float32)
        tokenizer = cfg.tokenizer.build(checkpoint_dir=folder)
        loader, loader_val, facts = module.setup_data(cfg, tokenizer, model)
    if options.validation:
        if loader_val is None:
            raise UserError("there is no validation set: set val_fraction above 0, or dataset_val")
        loader = loader_val
    counts = count_samples(loader, stop_ids=tokenizer.stop_ids())
    rows = islice(fed_rows(loader), options.samples)
    examples = example_lines(counts, loader.samples, tokenizer)
    if options.html:
        from .inspect_page import page

        title = f"{title}: {counts.source}"
        text = page(title, [*facts, *examples], counts, list(rows), tokenizer)
        options.html.expanduser().write_text(text, encoding="utf-8", newline="\n")
        print(options.html, file=sys.stderr if options.json else out)
    if options.json:
        for row in islice(fed_rows(loader), options.samples):
            print(json.dumps(as_json(row)), file=out)
        print(json.dumps(asdict(counts)), file=out)
    elif not options.html:
        is_coloured = out.isatty() and not os.environ.get("NO_COLOR")
        for number, row in enumerate(rows):
            print("\n".join(row_lines(number, row, tokenizer, colours=is_coloured)), file=out)
        print("\n".join([*facts, "", *count_lines(counts), *examples]), file=out)


def row_lines(
    number: int, row: "FedRow", tokenizer: "Tokenizer", *, colours: bool
) -> Iterator[str]:
    """Yield the text of a row: a heading, then each sample in it."""
    before, after = (GREEN, END) if colours else ("{+", "+}")
    dim, end = (DIM, END) if colours else ("", "")
    trained = sum(label >= 0 for label in row.labels)
    size = f"{len(row.tokens):,} tokens, {trained:,} trained"
    yield f"{dim}=== row {number}: {size}, {row.num_filler:,} filler{end}"
    for k, (first, last) in enumerate(row.spans()):
        yield f"{dim}--- sample {k} of {len(row.segments)}: {last - first:,} tokens{end}"
        text, at = "", first
        for is_trained, run in groupby(row.labels[first:last], key=lambda label: label >= 0):
            count = len(list(run))
            part = visible(tokenizer.decode(row.tokens[at : at + count]))
            text += f"{before}{part}{after}" if is_trained else part
            at += count
        yield text
    if row.num_filler:
        yield f"{dim}--- {row.num_filler:,} filler tokens{end}"


def count_lines(counts: "Counts") -> list[str]:
    """Return the counts as lines, with the histogram of lengths."""
    lines = [f"{value:>12}  {what}" for what, value in count_table(counts)]
    lines += ["", "samples by length in tokens:"]
    most = max(entry["samples"] for entry in counts.histogram)
    for entry in counts.histogram:
        bar = "#" * -(-entry["samples"] * _BAR // most)
        lines.append(f"{entry['from']:>7} to {entry['to']:>6}  {entry['samples']:>8}  {bar}")
    return lines


def count_table(counts: "Counts") -> list[tuple[str, str]]:
    """Return the counts in words, each with its value as it is shown."""
    return [
        ("rows read", f"{counts.rows_read:,}"),
        (f"rows cut at max_seq_len ({counts.share_cut:.1%})", f"{counts.rows_cut:,}"),
        ("rows skipped without a target", f"{counts.rows_skipped:,}"),
        ("rows that could not be read", f"{counts.rows_unreadable:,}"),
        ("samples of this set", f"{counts.samples:,}"),
        (f"tokens, the median sample has {counts.median:,}", f"{counts.num_tokens:,}"),
        (f"of them trained ({counts.share_trained:.1%})", f"{counts.num_targets:,}"),
        (f"filler (packing efficiency {counts.packing_efficiency:.1%})", f"{counts.num_filler:,}"),
        ("samples that came before, token for token", f"{counts.duplicates:,}"),
        (
            "samples with a trained turn whose terminator is not trained",
            f"{counts.terminator_not_trained:,}",
        ),
        ("control tokens inside texts, taken as text", f"{counts.control_tokens_in_text:,}"),
    ]


def example_lines(counts: "Counts", samples: "SampleSet", tokenizer: "Tokenizer") -> list[str]:
    """Return one line for each example of a fault: how the sample ends."""
    lines = []
    for what, indexes in counts.examples.items():
        for index in indexes:
            end = visible(tokenizer.decode(samples.sample(index)[0][-_END_TOKENS:].tolist()))
            end = end.replace("\n", "\\n")
            lines.append(f'{what.replace("_", " ")}: sample {index} ends with "{end}"')
    return lines


def visible(text: str) -> str:
    """Return the text with what a terminal would obey (escapes, controls) spelled out."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
