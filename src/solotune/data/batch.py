"""One micro-batch: tokens, shifted labels, positions and segment lengths, all built on the host.

B rows of the batch, S positions a row, M segments a row at most, T positions with a target.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # torch is slow to import, and the processes that tokenize do without it
    import torch
    from torch import Tensor

IGNORED = -100  # label of a position without a target


@dataclass(frozen=True)
class Batch:
    """A micro-batch, on one device except for `host_segments_BM`.

    `labels_BS[b, s]` is the token that position s predicts, -100 where it predicts none.
    `positions_BS` restart at each segment. `segments_BM` are the lengths of the segments of each
    row, zero-padded; what follows them in the row is filler. `target_rows_T` are the flat positions
    b * S + s with a target.
    """

    tokens_BS: "Tensor"  # int64
    labels_BS: "Tensor"  # int64
    positions_BS: "Tensor"  # int64
    segments_BM: "Tensor"  # int32
    target_rows_T: "Tensor"  # int64
    host_segments_BM: "Tensor"  # int32, always on the host: lengths can be read without a sync
    num_tokens: int  # without filler
    num_targets: int
    key: int | None = None  # of the random numbers that are drawn for it; see `batch_key`

    def to(self, device: "torch.device | str") -> "Batch":
        """The batch on `device`. To a card through pinned memory, without waiting for the copy."""
        import torch

        kind = torch.device(device).type
        if kind == "cpu":
            return self
        pin = kind == "cuda"
        moved = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, torch.Tensor) and entry.name != "host_segments_BM":
                source = _pinned(value) if pin else value
                moved[entry.name] = source.to(device, non_blocking=pin)
        return replace(self, **moved)


def batch_key(seed: int, epoch: int, index: int) -> int:
    """Return what keys the random numbers of a micro-batch: its place in a run, by hash, 63 bits.

    Whatever the order in which a schedule comes to it, and after a resume, they are the same.
    """
    digest = hashlib.blake2b(f"{seed} {epoch} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class Segment(NamedTuple):
    """A sample, or the part of one that a pack holds: tokens (int32) and trained flags (uint8).

    `following` is the token that its last position predicts, where the sample goes on elsewhere.
    """

    tokens: np.ndarray
    trained: np.ndarray
    following: int = IGNORED


_may_pin = True  # until it fails once in this process


def _pinned(tensor: "Tensor") -> "Tensor":
    """The tensor in pinned memory, or itself where the system refuses (WSL2 at some amount)."""
    global _may_pin
    if _may_pin:
        try:
            return tensor.pin_memory()  # from a cache that keeps each block until its copy is done
        except RuntimeError as error:
            _may_pin = False
            reason = str(error).splitlines()[0]
            print(
                f"warning: a batch cannot be pinned in host memory ({reason}): batches are copied "
                "to the device from pageable memory, which the host waits for"
            )
    return tensor


def collate(
    rows: Sequence[Sequence[Segment | tuple[np.ndarray, np.ndarray]]],
    *,
    row_length: int,
    max_segments: int,
    filler_token: int = 0,
    key: int | None = None,
) -> Batch:
    """A Batch of rows, each a list of segments (or of their tokens and flags) laid side by side.

    Labels are shifted here: the last position of a segment never predicts the first token of the
    next one in the row.
    """
    import torch

    shape = (len(rows), row_length)
    tokens_BS, labels_BS = np.full(shape, filler_token, np.int64), np.full(shape, IGNORED, np.int64)
    positions_BS = np.zeros(shape, np.int64)
    segments_BM = np.zeros((len(rows), max_segments), np.int32)
    for b, segments in enumerate(rows):
        start = 0
        for m, segment in enumerate(segments):
            if not isinstance(segment, Segment):
                segment = Segment(segment[0], segment[1])
            tokens, trained, following = segment
            end = start + len(tokens)
            tokens_BS[b, start:end] = tokens
            labels_BS[b, start : end - 1] = np.where(trained[1:], tokens[1:], IGNORED)
            labels_BS[b, end - 1] = following
            positions_BS[b, start:end] = np.arange(len(tokens))
            segments_BM[b, m] = len(tokens)
            start = end
    target_rows_T = np.flatnonzero(labels_BS != IGNORED)
    segments = torch.from_numpy(segments_BM)
    return Batch(
        tokens_BS=torch.from_numpy(tokens_BS),
        labels_BS=torch.from_numpy(labels_BS),
        positions_BS=torch.from_numpy(positions_BS),
        segments_BM=segments,
        target_rows_T=torch.from_numpy(target_rows_T),
        host_segments_BM=segments,
        num_tokens=int(segments_BM.sum()),
        num_targets=len(target_rows_T),
        key=key,
    )


def accumulation_groups(batches: Iterable[Batch], n: int) -> Iterator[list[Batch]]:
    """The batches in lists of `n`; the last list may be shorter and is a step of its own."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == n:
            yield group
            group = []
    if group:
        yield group
