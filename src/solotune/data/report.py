"""What became of the rows of a data set."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from solotune.data.formats import Format

SHOWN_FAULTS = 3  # rows that could not be read, of a whole data set


@dataclass
class Report:
    """What became of the rows; every count that is not zero is printed before training."""

    source: str
    format: Format | None  # None until the first row tells
    rows: int = 0
    rows_unreadable: int = 0
    rows_cut: int = 0  # longer than max_seq_len
    rows_skipped: int = 0  # without a target
    reasoning_lost: int = 0  # turns
    turns_without_terminator: int = 0
    plain_controls: int = 0  # control tokens spelled inside texts
    messages_not_rendered: int = 0
    columns_not_used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def add(self, rows: "Report") -> None:
        """Add what became of further rows; of their notes as many as are shown."""
        self.format = self.format or rows.format
        for entry in fields(self):
            value = getattr(self, entry.name)
            if type(value) is int:
                setattr(self, entry.name, value + getattr(rows, entry.name))
        self.columns_not_used |= rows.columns_not_used
        self.notes += rows.notes[: max(SHOWN_FAULTS - len(self.notes), 0)]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        return asdict(self) | {"columns_not_used": sorted(self.columns_not_used)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Report":
        """The report that `to_json` gave. Raises TypeError or KeyError for anything else."""
        values: dict[str, Any] = {**stored, "columns_not_used": set(stored["columns_not_used"])}
        return cls(**values)
