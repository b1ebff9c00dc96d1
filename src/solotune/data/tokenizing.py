"""Rows to tokens and label masks, a chunk of rows at a time, in this process or in another.

N samples of a chunk, T tokens of all of them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Literal, NamedTuple

import numpy as np

from solotune.data.chat import History, Span, TrainOn, chat_samples
from solotune.data.files import Row
from solotune.data.formats import Format, Layout, find_layout
from solotune.data.long_texts import encode_beginnings
from solotune.data.messages import Conversation
from solotune.data.preview import sample_lines
from solotune.data.report import SHOWN_FAULTS, Report
from solotune.data.samples import count_targets, row_hash
from solotune.data.shared_start import without_shared_start
from solotune.errors import DataError
from solotune.tokenizers import Rendering, Tokenizer

OnBadRow = Literal["stop", "skip"]
_written = json.JSONEncoder(sort_keys=True, default=str).encode


@dataclass(frozen=True)
class Rules:
    """What decides the tokens and labels of a row, beside the tokenizer.

    `format` None: that of the first row. `layout`: where it is known already, as in all chunks but
    the first. `cut`: rows end at the tokenizer's max_seq_len.
    """

    format: Format | None = None
    column_map: dict[str, str] = field(default_factory=dict)
    train_on_input: bool = False
    train_on: TrainOn = "all"
    history: History = "per_turn"
    on_bad_row: OnBadRow = "stop"
    cut: bool = True
    layout: Layout | None = None


@dataclass(frozen=True)
class Tokenized:
    """The samples of a chunk of rows, one after the other, and what became of its rows.

    `layout` is None as long as no row could be read.
    """

    tokens_T: np.ndarray  # int32
    trained_T: np.ndarray  # uint8
    lengths_N: np.ndarray  # int64
    rows_N: np.ndarray  # uint64, a hash of each sample's row
    report: Report
    layout: Layout | None = None


class _Draft(NamedTuple):
    """A sample before encoding."""

    rendering: Rendering
    trained: tuple[Span, ...]
    add_bos: bool
    add_eos: bool
    row: int


def tokenize_rows(tokenizer: Tokenizer, rows: Sequence[Row], rules: Rules) -> Tokenized:
    """The samples of `rows`. Raises DataError with the place of a row that cannot be used."""
    layout = rules.layout
    report = Report(source="", format=layout.format if layout else rules.format, rows=len(rows))
    drafts: list[_Draft] = []
    for row in rows:
        try:
            if row.fault is not None:
                raise DataError(row.fault)
            if layout is None:
                layout = find_layout(
                    row.columns, row.place, format=rules.format, column_map=rules.column_map
                )
                report.format = layout.format
            drafts += _drafts(tokenizer, row, layout, rules, report)
        except DataError as error:
            message = str(error) if str(error).startswith(row.place) else f"{row.place}: {error}"
            if rules.on_bad_row == "stop":
                knows_key = "dataset." in message
                hint = "" if knows_key else " (dataset.on_bad_row=skip leaves such rows out)"
                raise DataError(message + hint) from None
            report.rows_unreadable += 1
            if report.rows_unreadable <= SHOWN_FAULTS:
                report.notes.append(f"skipped {message}")
    return _encode(tokenizer, drafts, rules, report, layout)


def _drafts(
    tokenizer: Tokenizer, row: Row, layout: Layout, rules: Rules, report: Report
) -> list[_Draft]:
    """The samples of one row, not yet encoded. Raises DataError where the row cannot be used."""
    report.columns_not_used |= layout.not_used(row.columns)
    content = layout.parse(row.columns)
    if isinstance(content, Conversation):
        template = tokenizer.require_template()
        # a template may read any key, but a misspelt `weight` must not go unseen
        report.columns_not_used |= {
            f"{key} (of messages)" for key in content.other_keys if key not in template.source
        }
        samples = chat_samples(
            template,
            content,
            train_on=rules.train_on,
            history=rules.history,
            train_on_input=rules.train_on_input,
        )
        for sample in samples:
            report.messages_not_rendered += sample.not_shown
            report.reasoning_lost += sample.lost_reasoning
            report.turns_without_terminator += sample.ends_open
        # of the messages, not of the rendering: a template may write the date of today
        content_hash = row_hash(_written(content.messages))
        drafts = [
            _Draft(
                sample.rendering,
                sample.trained,
                add_bos=False,
                add_eos=sample.ends_open,
                row=content_hash,
            )
            for sample in samples
        ]
    elif not content.strip():  # BOS and EOS alone would teach to stop at once
        report.rows_skipped += 1
        return []
    else:
        text = _without_own_eos(content, tokenizer)
        rendering = Rendering(text, plain=tokenizer.spelled_controls(text))
        drafts = [
            _Draft(
                rendering,
                ((0, len(text)),),
                add_bos=tokenizer.adds_bos,
                add_eos=True,
                row=row_hash(content),
            )
        ]
    for draft in drafts:
        tokenizer.check_text(draft.rendering.text)
        report.plain_controls += len(draft.rendering.plain)
    return drafts


def _without_own_eos(text: str, tokenizer: Tokenizer) -> str:
    """A text row without the EOS and BOS that it spells at its ends; the real tokens are added."""
    eos, bos = tokenizer.token_text(tokenizer.eos_id), tokenizer.token_text(tokenizer.bos_id)
    text = text.removesuffix(eos) if eos else text
    return text.removeprefix(bos) if bos and tokenizer.adds_bos else text


def _encode(
    tokenizer: Tokenizer,
    drafts: Sequence[_Draft],
    rules: Rules,
    report: Report,
    layout: Layout | None,
) -> Tokenized:
    """Encode, add BOS and EOS, cut at max_seq_len, leave out samples without a target."""
    zero, one = np.zeros(1, np.uint8), np.ones(1, np.uint8)
    all_ids: list[list[int]] = []
    all_trained: list[np.ndarray] = [zero[:0]]
    hashes: list[int] = []
    renderings = [draft.rendering for draft in drafts]
    trained_spans = [draft.trained for draft in drafts]
    start: list[int] = []
    if not any(draft.add_bos for draft in drafts):
        start, renderings, trained_spans = without_shared_start(
            tokenizer, renderings, trained_spans
        )
    untrained = np.zeros(len(start), np.uint8)
    if rules.cut:
        encodings = encode_beginnings(tokenizer, renderings, max_tokens=tokenizer.max_seq_len + 1)
    else:
        encodings = tokenizer.encode_renderings(renderings)
    for draft, encoded, spans in zip(drafts, encodings, trained_spans, strict=True):
        ids, trained = encoded.ids, encoded.mask(spans)
        if start:
            ids, trained = start + ids, np.concatenate([untrained, trained])
        if draft.add_bos and tokenizer.bos_id is not None:
            ids, trained = [tokenizer.bos_id, *ids], np.concatenate([zero, trained])
        if draft.add_eos and tokenizer.eos_id is not None:
            ids, trained = [*ids, tokenizer.eos_id], np.concatenate([trained, one])
        if rules.cut and len(ids) > tokenizer.max_seq_len:
            report.rows_cut += 1
            ids, trained = ids[: tokenizer.max_seq_len], trained[: tokenizer.max_seq_len]
        if ids:
            all_ids.append(ids)
            all_trained.append(trained)
            hashes.append(draft.row)
    lengths_N = np.array([len(ids) for ids in all_ids], np.int64)
    trained_T = np.concatenate(all_trained)
    is_kept = count_targets(trained_T, np.cumsum(lengths_N) - lengths_N) > 0
    report.rows_skipped += len(drafts) - int(is_kept.sum())
    if not is_kept.all():
        trained_T = trained_T[np.repeat(is_kept, lengths_N)]
        lengths_N = lengths_N[is_kept]
        all_ids = list(compress(all_ids, is_kept))
    return Tokenized(
        tokens_T=np.fromiter(chain.from_iterable(all_ids), np.int32, len(trained_T)),
        trained_T=trained_T,
        lengths_N=lengths_N,
        rows_N=np.array(hashes, np.uint64)[is_kept],
        report=report,
        layout=layout,
    )


def closing_notes(tokenizer: Tokenizer, first: Tokenized) -> list[str]:
    """What to print of the whole set: how turns end, and its first sample as it is trained.

    `first` holds a sample.
    """
    notes = []
    if tokenizer.template is not None and first.report.format != "text":
        template = tokenizer.template
        terminator = template.terminator or "EOS, added once, as the chat template ends none"
        notes.append(f"assistant turns end with {terminator}")
        notes += tokenizer.notes
        if "strftime_now" in template.source and "date_string" not in template.variables:
            notes.append(
                "the chat template writes the date of today: set "
                "tokenizer.chat_template_kwargs.date_string to get the same tokens tomorrow"
            )
    sample = slice(first.lengths_N[0])
    lines = sample_lines(tokenizer, first.tokens_T[sample], first.trained_T[sample])
    return [*notes, "the first sample:", *lines]
