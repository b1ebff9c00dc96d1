"""Rows of a file as samples: label masks, and a count of everything that was left out."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from solotune.config.fitting import Minimum
from solotune.data.chat import History, Span, TrainOn, chat_samples
from solotune.data.files import Row
from solotune.data.formats import Format, Layout, find_layout
from solotune.data.messages import Conversation
from solotune.data.samples import Report, SampleSet, SampleWriter, chunks, row_hash
from solotune.data.sources import read_rows
from solotune.errors import DataError
from solotune.tokenizers import Rendering, Tokenizer

_CHUNK = 1000  # renderings that are encoded together
_SHOWN_FAULTS = 3


@dataclass(frozen=True)
class _Draft:
    """A sample before encoding."""

    rendering: Rendering
    trained: tuple[Span, ...]
    add_bos: bool
    add_eos: bool
    row: int


def dataset(
    tokenizer: Tokenizer,
    *,
    source: str,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    format: Format | None = None,
    column_map: dict[str, str] | None = None,
    train_on_input: bool = False,
    train_on: TrainOn = "all",
    history: History = "per_turn",
    packed: bool = True,
    on_bad_row: Literal["stop", "skip"] = "stop",
    max_rows: Annotated[int, Minimum(1)] | None = None,
) -> SampleSet:
    """Samples from a file, a folder, a glob or a data set of the Hub.

    `config`, `split` and `revision` choose a part of a Hub data set. `format` is detected from the
    columns of the first row where it is None; `column_map` gives the file's name for each of our
    column names. Trained are the assistant turns and their terminators (`train_on`: all | last),
    with `train_on_input` all tokens. `history`: per_turn | as_rendered, for templates that rewrite
    earlier turns. `on_bad_row`: stop | skip. `max_rows`: the first rows only. Raises DataError with
    file, row and reason.
    """
    return build_samples(
        tokenizer,
        read_rows(source, config=config, split=split, revision=revision),
        source=source,
        format=format,
        column_map=column_map,
        train_on_input=train_on_input,
        train_on=train_on,
        history=history,
        packed=packed,
        on_bad_row=on_bad_row,
        max_rows=max_rows,
    )


def build_samples(
    tokenizer: Tokenizer,
    rows: Iterator[Row],
    *,
    source: str,
    format: Format | None = None,
    column_map: dict[str, str] | None = None,
    train_on_input: bool = False,
    train_on: TrainOn = "all",
    history: History = "per_turn",
    packed: bool = True,
    on_bad_row: Literal["stop", "skip"] = "stop",
    max_rows: Annotated[int, Minimum(1)] | None = None,
) -> SampleSet:
    """Samples from any iterator of rows, by the rules of `dataset`."""
    report = Report(source=source, format=format)

    def drafts() -> Iterator[_Draft]:
        layout: Layout | None = None
        for row in rows:
            if max_rows is not None and report.rows >= max_rows:
                return
            report.rows += 1
            try:
                if row.fault is not None:
                    raise DataError(row.fault)
                if layout is None:
                    layout = find_layout(
                        row.columns, row.place, format=format, column_map=column_map
                    )
                    report.format = layout.format
                yield from _drafts(
                    tokenizer,
                    row,
                    layout,
                    report,
                    train_on_input=train_on_input,
                    train_on=train_on,
                    history=history,
                )
            except DataError as error:
                message = (
                    str(error) if str(error).startswith(row.place) else f"{row.place}: {error}"
                )
                if on_bad_row == "stop":
                    hint = (
                        ""
                        if "dataset." in message
                        else " (dataset.on_bad_row=skip leaves such rows out)"
                    )
                    raise DataError(message + hint) from None
                report.rows_unreadable += 1
                if report.rows_unreadable <= _SHOWN_FAULTS:
                    report.notes.append(f"skipped {message}")

    writer = SampleWriter()
    for chunk in chunks(drafts(), _CHUNK):
        _encode(tokenizer, chunk, writer, report)
    samples = writer.finish(report=report, packed=packed)
    if not len(samples):
        skipped = "".join(f"; {note}" for note in report.notes)
        raise DataError(
            f"{source} leaves nothing to train on: {report.rows} rows, {report.rows_unreadable} "
            f"unreadable, {report.rows_skipped} without a target (an assistant turn, within "
            f"tokenizer.max_seq_len={tokenizer.max_seq_len}){skipped}"
        )
    if tokenizer.template is not None and report.format != "text":
        report.notes += _template_notes(tokenizer)
    return samples


def _drafts(
    tokenizer: Tokenizer,
    row: Row,
    layout: Layout,
    report: Report,
    *,
    train_on_input: bool,
    train_on: TrainOn,
    history: History,
) -> Iterator[_Draft]:
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
            train_on=train_on,
            history=history,
            train_on_input=train_on_input,
        )
        report.messages_not_rendered += sum(sample.not_shown for sample in samples)
        report.reasoning_lost += sum(sample.lost_reasoning for sample in samples)
        report.turns_without_terminator += sum(sample.ends_open for sample in samples)
        # of the messages, not of the rendering: a template may write the date of today
        content_hash = row_hash(json.dumps(content.messages, sort_keys=True, default=str))
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
        return
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
    report.plain_controls += sum(len(draft.rendering.plain) for draft in drafts)
    yield from drafts


def _without_own_eos(text: str, tokenizer: Tokenizer) -> str:
    """A text row without the EOS and BOS that it spells at its ends; the real tokens are added."""
    eos, bos = tokenizer.token_text(tokenizer.eos_id), tokenizer.token_text(tokenizer.bos_id)
    text = text.removesuffix(eos) if eos else text
    return text.removeprefix(bos) if bos and tokenizer.adds_bos else text


def _encode(
    tokenizer: Tokenizer, drafts: list[_Draft], writer: SampleWriter, report: Report
) -> None:
    """Encode, add BOS and EOS, cut at max_seq_len, leave out samples without a target."""
    for draft, encoded in zip(
        drafts, tokenizer.encode_renderings([d.rendering for d in drafts]), strict=True
    ):
        ids, trained = encoded.ids, encoded.mask(draft.trained)
        if draft.add_bos and tokenizer.bos_id is not None:
            ids, trained = (
                [tokenizer.bos_id, *ids],
                np.concatenate([np.zeros(1, np.uint8), trained]),
            )
        if draft.add_eos and tokenizer.eos_id is not None:
            ids, trained = [*ids, tokenizer.eos_id], np.concatenate([trained, np.ones(1, np.uint8)])
        if len(ids) > tokenizer.max_seq_len:
            report.rows_cut += 1
            ids, trained = ids[: tokenizer.max_seq_len], trained[: tokenizer.max_seq_len]
        if trained[1:].any():
            writer.add(ids, trained, draft.row)
        else:
            report.rows_skipped += 1


def _template_notes(tokenizer: Tokenizer) -> list[str]:
    template = tokenizer.require_template()
    terminator = template.terminator or "EOS, added once, as the chat template ends none"
    notes = [f"assistant turns end with {terminator}"]
    if "strftime_now" in template.source and "date_string" not in template.variables:
        notes.append(
            "the chat template writes the date of today: set "
            "tokenizer.chat_template_kwargs.date_string to get the same tokens tomorrow"
        )
    return notes
