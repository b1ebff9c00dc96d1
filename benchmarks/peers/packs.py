"""The work that every peer does, and the record that it did it. Needs only NumPy.

`python packs.py PACKS` prints what each step consists of. Shapes: N optimizer steps, B rows a
step, S positions a row, M segments a row at most.
"""

import json
import sys
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

NO_TARGET = -100


@dataclass(frozen=True)
class Packs:
    """Rows of several samples each, one after the other, then filler."""

    tokens_NBS: np.ndarray  # int64
    labels_NBS: np.ndarray  # int64, the target *of position s*, NO_TARGET where there is none
    positions_NBS: np.ndarray  # int64, restart at each segment, 0 at filler
    segments_NBM: np.ndarray  # int32 lengths, zero-padded; filler is not a segment

    @classmethod
    def load(cls, path: Path) -> "Packs":
        """Read the file that `write` made: arrays only, never pickled objects."""
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{field.name: arrays[field.name] for field in fields(cls)})

    def write(self, path: Path) -> None:
        """Write all arrays into one .npz file."""
        np.savez(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    def labels_in_place(self) -> np.ndarray:
        """Labels [N, B, S] for libraries that shift them: each target at its own position."""
        labels_NBS = np.full_like(self.labels_NBS, NO_TARGET)
        labels_NBS[..., 1:] = self.labels_NBS[..., :-1]
        return labels_NBS

    def work(self) -> list[dict]:
        """What each step consists of."""
        steps = zip(self.tokens_NBS, self.labels_NBS, self.segments_NBM, strict=True)
        return [
            {
                "tokens": digest(tokens_BS),
                "num_tokens": int(segments_BM.sum()),
                "num_targets": int((labels_BS != NO_TARGET).sum()),
            }
            for tokens_BS, labels_BS, segments_BM in steps
        ]


def digest(tokens_BS: np.ndarray) -> str:
    """Eight hexadecimal digits that change with any token id or its place."""
    return f"{zlib.crc32(np.ascontiguousarray(tokens_BS, dtype=np.int64).tobytes()):08x}"


class StepLog:
    """One JSON line an optimizer step, flushed at once: its arrival is timed from outside."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8")

    def step(
        self, number: int, *, loss: float, seconds: float, tokens: str, num_targets: int
    ) -> None:
        """Record a step: `seconds` by the library's own clock, `tokens` a digest."""
        row = {"step": number, "loss": loss, "seconds": seconds, "tokens": tokens}
        print(json.dumps(row | {"num_targets": num_targets}), file=self.file, flush=True)


if __name__ == "__main__":
    print(json.dumps(Packs.load(Path(sys.argv[1])).work()))
