"""What a run says about its peak: the lines, the row of metrics.jsonl, the picture."""

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from solotune.memory.report import MemoryReport, draw
from solotune.memory.timeline import CATEGORIES, PLACES, Timeline
from solotune.memory.tracker import MemoryTracker
from solotune.training import RunLog
from tests.models.tiny import make_batch

from .allocations import allocated
from .one_step import CHECKPOINTING, OFFLOADING, OneStep


def report_of(one_step: OneStep, folder: Path, **on: Any) -> MemoryReport:
    return MemoryReport(
        one_step.model,
        loss_fn=one_step.loss_fn,
        stepper=one_step.stepper,
        host=one_step.host,
        log=RunLog(folder, device=torch.device("cpu"), config_yaml=""),
        on=one_step.on | on,
    )


def run(one_step: OneStep, report: MemoryReport, *, steps: range) -> list[dict[str, Any]]:
    """Do steps and return the rows of metrics.jsonl that the report wrote."""
    with report.log.running(100, first_step=0):
        for number in steps:
            with report.step(number, one_step.group):
                one_step()
    text = (report.log.output_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_the_peak_of_the_run_is_written_by_category_and_is_the_allocators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_step = OneStep(**OFFLOADING)
    row = run(one_step, report_of(one_step, tmp_path), steps=range(1, 4))[-1]
    assert row["step"] == 2  # the first with optimizer state
    device, host = row["memory_device_gib"], row["memory_host_gib"]
    assert set(device) == set(CATEGORIES)
    truth = allocated(one_step).peak
    at_start = device["weights"] + device["optimizer state"] + device["logits"] + sum(host.values())
    assert row["memory_allocator_gib"] == pytest.approx(at_start + truth / 2**30, rel=0.02)
    assert sum(device.values()) <= row["memory_allocator_gib"]
    printed = capsys.readouterr().out
    assert f"weights {device['weights'] * 1024:.1f} MiB" in printed
    assert f"on device, in backward of step {row['step']}" in printed


def test_the_first_two_steps_are_tracked_and_then_only_larger_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked: list[int] = []
    enter = MemoryTracker.__enter__
    one_step = OneStep(**CHECKPOINTING)
    report = report_of(one_step, tmp_path)

    def count(self: MemoryTracker) -> MemoryTracker:
        tracked.append(len(tracked))
        return enter(self)

    monkeypatch.setattr(MemoryTracker, "__enter__", count)
    run(one_step, report, steps=range(1, 5))
    assert len(tracked) == 2
    small, large = make_batch((50,), (20,), vocab=1000), make_batch((300,), (20,), vocab=1000)
    one_step.group = [small]
    run(one_step, report, steps=range(5, 7))
    assert len(tracked) == 2
    one_step.group = [large]
    rows = run(one_step, report, steps=range(7, 9))
    assert len(tracked) == 3
    assert [row["step"] for row in rows] == [1, 2, 7]


def test_without_log_memory_nothing_is_written(tmp_path: Path) -> None:
    one_step = OneStep()
    assert run(one_step, report_of(one_step, tmp_path, log_memory=False), steps=range(1, 4)) == []
    assert not (tmp_path / "memory.png").exists()


def test_without_matplotlib_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    one_step = OneStep(**CHECKPOINTING)
    run(one_step, report_of(one_step, tmp_path), steps=range(1, 2))
    assert "memory.png needs matplotlib: pip install 'solotune[plot]'" in capsys.readouterr().out
    assert not (tmp_path / "memory.png").exists()


def test_the_picture_shows_each_category_where_it_is_alive(tmp_path: Path) -> None:
    """Weights alone, then weights and activations: their colours are where the bytes are."""
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    from solotune.memory.report import COLORS

    zeros = np.zeros(3, dtype=np.int64)
    series = {(place, category): zeros for place in PLACES for category in CATEGORIES}
    series["device", "weights"] = np.full(3, 2**30)
    series["device", "activations"] = np.array([0, 3 * 2**30, 3 * 2**30])
    timeline = Timeline(np.array([0.0, 1.0, 2.0]), ["forward", "forward", "backward"], series)
    path = tmp_path / "memory.png"
    draw(timeline, path, title="a step")
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    pixels = imread(path)[:, :, :3]
    assert pixels.shape[:2] == (height, width)

    def share(category: str, columns: slice) -> float:
        is_color = np.abs(pixels[:, columns] - to_rgb(COLORS[category])).max(-1) < 0.01
        return float(is_color.mean())

    left, right = slice(width // 8, width // 4), slice(width // 2, 3 * width // 4)
    assert share("weights", left) == pytest.approx(share("weights", right), rel=0.05)
    assert share("activations", left) == 0
    assert share("activations", right) == pytest.approx(3 * share("weights", right), rel=0.05)


@pytest.mark.gpu
def test_on_a_card_allocated_and_reserved_stand_beside_each_other(tmp_path: Path) -> None:
    from solotune.memory.report import _allocator

    device, snapshot = torch.device("cuda"), tmp_path / "memory_snapshot.pickle"
    with _allocator(device, snapshot) as peaks:
        torch.zeros(2**20, device=device)
    assert 0 < 2**22 <= peaks["allocated"] <= peaks["reserved"]
    assert snapshot.stat().st_size > 0
