"""`tune inspect data` shows what `tune run` feeds, batch by batch."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from solotune.data import Batch

from .conftest import TRAINING, basics, names, tune


def as_shown(batch: Batch) -> list[dict]:
    """The rows of a batch by the words of the command: labels unshifted, segments without zeros."""
    rows = []
    for b, length in enumerate(batch.host_segments_BM.sum(1).tolist()):
        labels = [-100, *batch.labels_BS[b].tolist()[:-1]]
        segments = [n for n in batch.host_segments_BM[b].tolist() if n]
        assert labels[length:] == [-100] * len(labels[length:])
        tokens = batch.tokens_BS[b].tolist()
        rows.append({"tokens": tokens, "labels": labels, "segments": segments})
    return rows


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("recipe", TRAINING, ids=names(TRAINING))
def test_the_rows_are_those_that_a_run_trains_on(
    recipe: Path,
    packed: bool,
    train: Callable[..., Path],
    models: dict[str, Path],
    chats: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    fed: list[dict] = []
    to = Batch.to

    def recorded(batch: Batch, device: object) -> Batch:
        fed.extend(as_shown(batch))
        return to(batch, "cpu")

    monkeypatch.setattr(Batch, "to", recorded)
    changes = {"max_steps_per_epoch": None, "batch_size": 2, "dataset.packed": packed}
    train(recipe, **changes)
    monkeypatch.undo()
    capsys.readouterr()
    words = basics(models["untied"], chats, recipe=recipe, **changes)
    assert tune("inspect", "data", recipe, *words, "--json", "--samples", "99") == 0
    *rows, counts = map(json.loads, capsys.readouterr().out.splitlines())
    assert rows == fed
    assert counts["num_targets"] == sum(label >= 0 for row in fed for label in row["labels"])
