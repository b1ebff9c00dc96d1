"""Sweeps: what they try, in which order, and how they end, are interrupted and go on."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.cli.sweep_result import (  # pyright: ignore[reportMissingImports]
    PATIENCE,
    Rule,
    measure,
)
from solotune.config.sweep import (
    Axis,
    Range,
    drawn,
    grid,
    name_of,
    read_axes,
    split_values,
    words_of,
)
from solotune.errors import UsageError

# A recipe without torch, so that a run takes a tenth of a second: losses by formula, and a file
# that holds the step as its checkpoint. A rate above 1 diverges.
RECIPE = '''\
"""A recipe of no library."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from solotune.config import ConfigError, resolved_yaml
from solotune.errors import UserError


@dataclass(kw_only=True)
class Config:
    output_dir: str | None = None
    resume_from_checkpoint: bool | str = False
    overwrite: bool = False
    lr: float = 0.1
    rank: int = 8
    names: list[str] | None = None
    note: str = ""
    steps: int = 4
    seconds: float = 0.0  # of a step
    fail: bool = False
    saves: bool = True


def validate(cfg):
    if cfg.rank % 8:
        raise ConfigError(f"rank={cfg.rank}: use a multiple of 8")


def main(cfg):
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state"
    first = int(state.read_text()) if cfg.resume_from_checkpoint and state.exists() else 0
    (folder / "config.yaml").write_text(resolved_yaml(cfg))
    with (folder / "starts").open("a") as file:
        file.write(f"{first} {os.getpid()}\\n")
    if cfg.fail and not Path("repaired").exists():
        raise UserError("fail=True: make the file `repaired`")
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stop.append(number))
    with (folder / "metrics.jsonl").open("a" if first else "w") as file:

        def write(**row):
            file.write(json.dumps(row) + "\\n")
            file.flush()

        if not first:
            write(step=0, val_loss=3.0)
        for step in range(first + 1, cfg.steps + 1):
            time.sleep(cfg.seconds)
            loss = 3.0 * cfg.lr if cfg.lr > 1 else 3.0 / (1 + cfg.lr * step)
            write(step=step, loss=loss, seconds_per_step=0.5, peak_memory_gib=cfg.rank / 8)
            if cfg.saves:
                state.write_text(str(step))
            if stop and step < cfg.steps:
                return 128 + stop[0]
        write(step=cfg.steps, val_loss=loss)
    print(folder)
    return 0
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the recipe in toy.py."""
    (tmp_path / "toy.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(*words: str) -> int:
    return main(["sweep", "toy.py", *words])


def rows(path: Path) -> list[dict]:
    return json.loads((path / "sweep.json").read_text())["runs"]


def by_values(path: Path) -> dict[str, dict]:
    return {" ".join(row["values"].values()): row for row in rows(path)}


# --- grammar ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4", ["1e-4"]),
        ("1e-4,1e-5", ["1e-4", "1e-5"]),
        ("1, 2 ,3", ["1", "2", "3"]),
        ("[a, b]", ["[a, b]"]),
        ("[a, b],[c]", ["[a, b]", "[c]"]),
        ("[[a, b], c],{x: 1, y: 2}", ["[[a, b], c]", "{x: 1, y: 2}"]),
        ("'a, b',c", ["'a, b'", "c"]),
        ('"a, b"', ['"a, b"']),
        ("don't,won't", ["don't", "won't"]),
        (r"a\,b", ["a,b"]),
        (r"a\,b,c", ["a,b", "c"]),
        (r"C:\x,D:\y", [r"C:\x", r"D:\y"]),
        ("layers.[0-9]{1,2}", ["layers.[0-9]{1,2}"]),
        ("a],b", ["a]", "b"]),
        ("", [""]),
        ("a,", ["a", ""]),
    ],
)
def test_values_are_what_stands_between_the_commas_that_separate(text: str, values: list[str]):
    assert split_values(text) == values


def test_words_with_one_value_are_for_all_runs():
    axes, fixed = read_axes(
        ["lr=1,2", r"dataset=a\,b.jsonl", "~clip", "names=[a, b]", "rank=8..64", "drop=1e-3..0.5"]
    )
    assert fixed == ["dataset=a,b.jsonl", "~clip", "names=[a, b]"]
    ranges = [Range(8.0, 64.0, True), Range(1e-3, 0.5, False)]
    assert axes == [
        Axis("lr", ("1", "2")),
        *(Axis(key, each) for key, each in zip(("rank", "drop"), ranges, strict=True)),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=1,,2"], "a value is empty"),
        (["lr=1,1"], "1 is there twice"),
        (["lr=1,2", "lr=3,4"], "lr is given twice"),
        (["lr=1,2", "lr=3"], "lr is given twice"),
        (["lr=0..1"], "above 0"),
        (["lr=2..1"], "to a higher one"),
        (["lr=1..2,5"], "a range stands alone"),
        (["lr"], "an override is key=value"),
    ],
)
def test_a_word_that_can_only_be_a_slip_is_refused(words: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        read_axes(words)


def test_the_first_runs_of_a_grid_show_every_axis():
    values = [("1", "2", "3"), ("x", "y", "z"), ("t", "f")]
    runs = grid([Axis(key, each) for key, each in zip("abc", values, strict=True)])
    assert len(set(runs)) == len(runs) == 18
    for number, of_axis in enumerate(values):
        assert len({run[number] for run in runs[:3]}) == len(of_axis)
        for count in range(1, len(runs)):
            tried = [run[number] for run in runs[:count]]
            times = [tried.count(value) for value in of_axis]
            assert max(times) - min(times) <= 3


def test_random_runs_differ_stay_inside_their_ranges_and_grow():
    axes = [Axis("lr", Range(1e-5, 1e-3, False)), Axis("rank", Range(8, 64, True))]
    axes.append(Axis("kind", ("a", "b")))
    runs = drawn(axes, count=200, seed=3)
    assert len(set(runs)) == 200
    assert runs[:7] == drawn(axes, count=7, seed=3) != drawn(axes, count=7, seed=4)
    rates = [float(run[0]) for run in runs]
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)
    assert 70 <= sum(rate < 1e-4 for rate in rates) <= 130  # half of the logarithms
    assert all(run[1].isdigit() and 8 <= int(run[1]) <= 64 for run in runs)


def test_a_range_needs_a_number_of_runs_and_a_number_of_runs_enough_combinations():
    with pytest.raises(UsageError, match="lr: a range needs --random N"):
        grid([Axis("lr", Range(1, 2, False))])
    few = [Axis("a", ("1", "2")), Axis("b", ("1", "2"))]
    assert sorted(drawn(few, count=4, seed=0)) == sorted(grid(few))
    with pytest.raises(UsageError, match="these axes have 4 combinations"):
        drawn(few, count=5, seed=0)


def test_names_are_readable_differ_and_stay_in_their_folder():
    axes = [Axis("optimizer.lr", ("1e-4",)), Axis("dataset", ("x",))]
    assert name_of(axes, ("1e-4", "chats")) == "lr=1e-4_dataset=chats"
    both = [Axis("optimizer.weight_decay", ()), Axis("loss.weight_decay", ())]
    assert name_of(both, ("0", "1")) == "optimizer.weight_decay=0_loss.weight_decay=1"
    values = ["a/b", "a-b", "../..", "", "x" * 300, "x" * 301, "a b"]
    names = [name_of([Axis("dataset", ())], (value,)) for value in values]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 80 for name in names)
    assert words_of(axes, ("1e-4", "a=b")) == ["optimizer.lr=1e-4", "dataset=a=b"]


# --- divergence and numbers -------------------------------------------------------------------


def logged(*losses: float | None, first: float | None = 3.0) -> list[dict]:
    before = [] if first is None else [{"step": 0, "val_loss": first}]
    return before + [{"step": n, "loss": loss} for n, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (logged(3, 2, 1), None),
        (logged(*[9] * (PATIENCE - 1), 2, *[9] * (PATIENCE - 1)), None),
        (logged(3, *[6.1] * PATIENCE), "step 6: the loss was above 6 in 5 logged steps"),
        (logged(3, *[5.9] * PATIENCE), None),
        (logged(*[1.0] * 3, *[1.4] * PATIENCE, first=0.1), "above 1.1 in"),
        (logged(2.0, *[4.1] * PATIENCE, first=None), "above 4 in"),
        (logged(3, None), "step 2: loss is not finite"),
        ([*logged(3), {"step": 1, "val_loss": None}], "step 1: the validation loss is not finite"),
        ([*logged(3), {"step": 1, "val_loss": 6.5}], "step 1: the validation loss is above 6"),
        ([*logged(3), {"step": 2, "loss": 3, "grad_norm": None}], "step 2: grad_norm is not"),
        ([], None),
    ],
)
def test_a_run_diverges(rows: list[dict], reason: str | None):
    found = Rule().divergence(rows)
    assert found == reason if reason is None else found and reason in found


def test_a_run_that_skips_steps_may_have_some_that_are_not_finite():
    rule = Rule(may_skip=True)
    assert rule.divergence(logged(3, None, 3, None, 3)) is None
    assert "not finite in 5" in str(rule.divergence(logged(3, *[None] * PATIENCE)))


def test_a_bound_of_ones_own_replaces_the_rule():
    assert "above 2.5" in str(Rule(max_loss=2.5).divergence(logged(*[2.6] * PATIENCE)))
    assert Rule(max_loss=20).divergence(logged(*[19] * 9)) is None
    assert "above 2.5" in str(Rule(max_loss=2.5))


def test_the_numbers_of_a_run_are_those_of_its_log():
    log = [{"step": 0, "val_loss": 3.0}]
    times = {"seconds_per_step": 0.5, "peak_memory_gib": 1.0}
    log += [{"step": n, "loss": float(n), **times} for n in range(2, 42, 2)]  # every second one
    log[3]["peak_memory_gib"] = 2.5
    log += [{"step": 20, "val_loss": 1.5}, {"step": 40, "val_loss": 2.0}]
    assert measure(log) == {
        "val_loss": 2.0,
        "best_val_loss": 1.5,
        "loss": 39.0,
        "steps": 40,
        "seconds": 20.0,
        "peak_memory_gib": 2.5,
    }
    assert measure([])["steps"] == 0


# --- the command ------------------------------------------------------------------------------


def test_a_sweep_runs_every_combination_and_compares_them(folder: Path, capsys):
    assert sweep("lr=0.1,0.5,9", "rank=8,16", "output_dir=out", "steps=3") == 0
    out = folder / "out"
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == sorted(
        f"lr={lr}_rank={rank}" for lr in ("0.1", "0.5", "9") for rank in (8, 16)
    )
    found = by_values(out)
    assert found["0.5 16"]["status"] == "done"
    assert found["0.5 16"]["numbers"] == {
        "val_loss": pytest.approx(3 / 2.5),
        "best_val_loss": pytest.approx(3 / 2.5),
        "loss": pytest.approx(3 / 2.5),
        "steps": 3,
        "seconds": 1.5,
        "peak_memory_gib": 2.0,
    }
    assert found["9 8"]["status"] == "diverged"
    assert found["9 8"]["numbers"]["val_loss"] is None
    assert "above 6" in found["9 8"]["error"]
    with (out / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 6
    assert {row["status"] for row in table} == {"done", "diverged"}
    assert (out / "sweep.md").read_text().count("\n") == 8
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "out"
    assert lines[-2] == "lowest loss: out/lr=0.5_rank=16"
    assert "a run has diverged" in lines[1]


def test_all_combinations_are_checked_before_the_first_run(folder: Path, capsys):
    assert sweep("lr=0.1,x", "rank=8,12", "output_dir=out") == 1
    error = capsys.readouterr().err
    assert "no run was started" in error
    assert "lr=x_rank=12" in error or "lr=x_rank=8 and 1 more: lr: a number is needed" in error
    assert sweep("lr=0.1,0.2", "rank=8,12", "output_dir=out") == 1
    error = capsys.readouterr().err
    assert "lr=0.2_rank=12 and 1 more: rank=12: use a multiple of 8" in error
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["lr=0.1"], 2, "nothing is swept"),
        (["output_dir=a,b"], 2, "output_dir cannot be swept"),
        (["lr=1,2", "overwrite=True"], 2, "a sweep deletes nothing"),
        (["lr=1,2", "resume_from_checkpoint=True"], 2, "needs output_dir"),
        (["lr=1,2", "resume_from_checkpoint=gone"], 1, "gone holds no sweep"),
        (["lr=1,2", "output_dir=."], 1, "is not empty"),
        (["lr=1..2"], 2, "lr: a range needs --random N"),
        (["lr=1,2", "--random", "0"], 2, "1 or more runs"),
        (["lr=1,2", "--nproc_per_node", "2"], 2, "a flag of torchrun"),
        (["lrr=1,2"], 1, "did you mean lr?"),
    ],
)
def test_what_cannot_be_swept_is_refused_by_name(folder: Path, capsys, words, code, message):
    assert sweep(*words) == code
    assert message in capsys.readouterr().err


def test_a_recipe_without_losses_is_refused_by_name(capsys):
    assert main(["sweep", "generate", "temperature=0,1", "checkpoint_dir=x", "prompt=y"]) == 1
    assert "generate has no output_dir" in capsys.readouterr().err


def test_a_failed_run_is_a_row_with_its_sentence_and_is_tried_again(folder: Path, capsys):
    words = ("fail=False,True", "names=[a, b],[c]", "output_dir=out")
    assert sweep(*words) == 1
    out = folder / "out"
    statuses = [row["status"] for row in rows(out)]
    assert sorted(statuses) == ["done", "done", "failed", "failed"]
    assert by_values(out)["True [c]"]["error"] == "fail=True: make the file `repaired`"
    assert "2 runs failed or were stopped" in capsys.readouterr().out
    (folder / "repaired").touch()
    assert sweep(*words, "resume_from_checkpoint=True") == 0
    starts = [len(path.read_text().splitlines()) for path in sorted(out.glob("*/starts"))]
    assert sorted(starts) == [1, 1, 2, 2]


def test_values_may_be_added_and_finished_runs_are_not_repeated(folder: Path, capsys):
    assert sweep("lr=0.1,0.2", "output_dir=out", "note=a b") == 0
    words = ("lr=0.1,0.2,0.3", "resume_from_checkpoint=out")
    assert sweep(*words, "note=c") == 1
    assert "was begun with fixed note=a b, not note=c" in capsys.readouterr().err
    assert sweep(*words, "note=a b") == 0
    assert [len(path.read_text().splitlines()) for path in folder.glob("out/*/starts")] == [1] * 3
    assert len(rows(folder / "out")) == 3
    (folder / "toy.py").write_text(RECIPE.replace("steps: int = 4", "steps: int = 5"))
    assert sweep(*words, "note=a b") == 1
    assert "steps was 4 when this run was made, and is 5 now" in capsys.readouterr().err


def test_without_matplotlib_there_is_a_sentence_and_no_picture(folder: Path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert sweep("lr=0.1,0.2", "output_dir=out") == 0
    assert "sweep.png needs matplotlib: pip install 'solotune[plot]'" in capsys.readouterr().out
    assert not (folder / "out/sweep.png").exists()


def test_the_command_imports_no_torch(folder: Path):
    code = (
        "import sys; from solotune.cli.main import main;"
        "main(['sweep', 'toy.py', 'lr=1,2', 'steps=1', 'output_dir=out']);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# --- interruption -----------------------------------------------------------------------------

WORDS = ("lr=0.1,0.2,0.3", "rank=8,16", "steps=6", "seconds=0.05", "output_dir=out")


def start() -> subprocess.Popen:
    """Start the sweep of WORDS as a command."""
    return subprocess.Popen(
        [sys.executable, "-m", "solotune", "sweep", "toy.py", *WORDS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def steps_of(out: Path, number: int) -> int:
    """Return the steps that the sweep's run `number` has saved."""
    name = ["lr=0.1_rank=8", "lr=0.2_rank=16", "lr=0.3_rank=8"][number]
    state = out / name / "state"
    return int(state.read_text() or 0) if state.exists() else 0


def process_of(out: Path, number: int) -> int:
    """Return the process of the newest start of a run."""
    name = ["lr=0.1_rank=8", "lr=0.2_rank=16", "lr=0.3_rank=8"][number]
    return int((out / name / "starts").read_text().split()[-1])


def is_complete(out: Path) -> bool:
    """Whether all six rows of the table hold the numbers of an uninterrupted run."""
    return (
        all(
            row["status"] == "done"
            and row["numbers"]["steps"] == 6
            and row["numbers"]["val_loss"]
            == pytest.approx(3 / (1 + 6 * float(row["values"]["lr"])))
            for row in rows(out)
        )
        and len(rows(out)) == 6
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_cleanly_and_the_last_line_goes_on(folder: Path, capsys, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("ignored here, as under nohup, and so by the sweep")
    out, process = folder / "out", start()
    wait_for(lambda: steps_of(out, 1) >= 2)
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    last = stdout.splitlines()[-1]
    assert last.startswith(
        f"stopped by {number.name}, 1 of 6 runs are over; go on with: tune sweep"
    )
    assert rows(out)[1]["status"] == "stopped"
    assert 2 <= steps_of(out, 1) < 6
    at = steps_of(out, 1)

    assert main(last.partition("go on with: tune ")[2].split()) == 0
    assert is_complete(out)
    starts = [line.split()[0] for line in (out / "lr=0.2_rank=16/starts").read_text().splitlines()]
    assert starts == ["0", str(at)], "it went on where it had saved"
    assert (out / "lr=0.1_rank=8/starts").read_text().count("\n") == 1, "it was not repeated"


def test_a_killed_sweep_goes_on_once_its_run_is_over(folder: Path, capsys):
    out, process = folder / "out", start()
    wait_for(lambda: steps_of(out, 1) >= 2)
    run = process_of(out, 1)
    os.kill(run, signal.SIGSTOP)  # it outlives the sweep
    process.kill()
    process.communicate()
    assert sweep(*WORDS, "resume_from_checkpoint=True") == 1
    assert f"a run of this sweep is still going, as process {run}" in capsys.readouterr().err
    os.kill(run, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{run}").exists())
    assert sweep(*WORDS, "resume_from_checkpoint=True") == 0
    assert is_complete(out)


def test_a_killed_run_is_a_failed_row_and_the_others_go_on(folder: Path, capsys):
    out, process = folder / "out", start()
    wait_for(lambda: steps_of(out, 1) >= 2)
    os.kill(process_of(out, 1), signal.SIGKILL)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert [row["status"] for row in rows(out)].count("done") == 5
    assert "ended by SIGKILL" in by_values(out)["0.2 16"]["error"]
    assert "try them again with: tune sweep" in stdout
    assert sweep(*WORDS, "resume_from_checkpoint=True") == 0
    assert is_complete(out)


def test_a_half_run_that_saved_nothing_begins_again(folder: Path, capsys):
    assert sweep(*WORDS) == 0
    out = folder / "out"
    held = json.loads((out / "sweep.json").read_text())
    held["runs"][2] |= {"status": "", "numbers": {}}  # as it stood when the sweep was killed
    (out / "sweep.json").write_text(json.dumps(held))
    (out / "lr=0.3_rank=8/state").unlink()
    shutil.rmtree(out / "lr=0.1_rank=16")
    held["runs"][3] |= {"status": "", "numbers": {}}
    (out / "sweep.json").write_text(json.dumps(held))
    assert sweep(*WORDS, "resume_from_checkpoint=True") == 0
    assert is_complete(out)
    begun = (out / "lr=0.3_rank=8/starts").read_text().splitlines()
    assert [line.split()[0] for line in begun] == ["0", "0"]
