"""The known formats, the names of their columns, and which of them the columns of a row are.

| format        | columns (?: may be missing)          | becomes                               |
|---------------|--------------------------------------|---------------------------------------|
| messages      | messages, system?, tools?            | the conversation                      |
| conversations | conversations, system?, tools?       | the conversation                      |
| prompt        | prompt, completion, system?, tools?  | a user and an assistant message       |
| instruction   | instruction, output, input?,         | the same; input after an empty line,  |
|               | history?, system?                    | behind the pairs of the history       |
| text          | text                                 | text as it stands                     |
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from solotune.errors import DataError

Format = Literal["messages", "conversations", "prompt", "instruction", "text"]

# In the order in which they are tried; the columns that a row must have.
FORMATS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL: dict[Format, tuple[str, ...]] = {
    "messages": ("system", "tools"),
    "conversations": ("system", "tools"),
    "prompt": ("system", "tools"),
    "instruction": ("input", "history", "system"),
}
_ANSWERS = ("completion", "output")

# Other names that a column is known by, taken where no two of them are in a row.
OTHER_NAMES = {
    "conversations": ("conversation",),
    "prompt": ("question", "query", "input"),
    "completion": ("response", "answer", "output"),
    "output": ("response", "completion", "answer"),
    "input": ("context",),
    "system": ("system_prompt",),
    "tools": ("functions",),
}


def required_columns(format: Format, answered: bool) -> Sequence[str]:
    """The columns that a row must have; not `answered`: without what is to be answered."""
    return [column for column in FORMATS[format] if answered or column not in _ANSWERS]


def other_names(column: str, format: Format, found: Iterable[str]) -> list[str]:
    """The other names of a column that are among the columns `found`."""
    taken = FORMATS[format]
    return [n for n in OTHER_NAMES.get(column, ()) if n in found and n not in taken]


def detect(columns: Mapping[str, Any], place: str, *, found: set[str], answered: bool) -> Format:
    """The format of a row that stands at `place`; `found` are its columns by their mapped names.

    Raises DataError where it has none or may have several, and where its answers are rated.
    """

    def those_with(is_there: Callable[[str, Format], bool]) -> list[Format]:
        return [f for f in FORMATS if all(is_there(c, f) for c in required_columns(f, answered))]

    complete = those_with(lambda column, _: column in found)
    alike = those_with(lambda column, f: column in found or len(other_names(column, f, found)) > 0)
    chosen: Format
    if complete and complete[0] != "text":
        chosen = complete[0]
    elif complete and len(alike) > 1:
        others = " or ".join(alike)
        raise DataError(
            f"{place}: the columns {sorted(columns)} may be {others}: set dataset.format"
        )
    elif not alike:
        raise DataError(f"{place}: {_no_format(found, columns)}")
    else:  # an instruction goes before a prompt, which may be named `input`
        chosen = "instruction" if "instruction" in alike else alike[0]
        if chosen == "prompt" and answered and "context" in found:
            raise DataError(
                f"{place}: the column context would be left out of {sorted(columns)}: for a "
                "question with its context set dataset.column_map.instruction, .input and .output, "
                "for the question alone dataset.format=prompt"
            )
    if answered and chosen != "text":
        _refuse_preferences(chosen, found, columns, place)
    return chosen


def _refuse_preferences(
    format: Format, found: set[str], columns: Mapping[str, Any], place: str
) -> None:
    """Raise DataError for rows that rate answers, and for those that stop before two of them."""
    if isinstance(columns.get("label"), bool):
        raise DataError(
            f"{place}: label says which answers are good, and fine-tuning would learn the bad ones "
            f"too: leave them out of the file, or set dataset.format={format}"
        )
    turns = columns.get(format)
    last = turns[-1] if isinstance(turns, list) and turns else None
    is_open = isinstance(last, dict) and (last.get("role") or last.get("from")) in ("user", "human")
    if {"chosen", "rejected"} <= found and is_open:
        raise DataError(
            f"{place}: chosen and rejected are two answers to {format}, for preference training; "
            f"to learn the chosen one append it to {format}"
        )


def _no_format(found: set[str], columns: Mapping[str, Any]) -> str:
    if {"chosen", "rejected"} <= found:
        column = "messages" if isinstance(columns.get("chosen"), list) else "completion"
        return (
            "chosen and rejected are two answers for preference training; to learn the chosen one "
            f"set dataset.column_map.{column}=chosen"
        )
    known = "; ".join(f"{name}: {', '.join(wanted)}" for name, wanted in FORMATS.items())
    return (
        f"no known format has the columns {sorted(columns)} (wanted {known}): name yours "
        "with dataset.column_map"
    )
