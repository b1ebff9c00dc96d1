"""Tokenizing in several processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from solotune import data
from solotune.data import workers
from solotune.data.tokenizing import Rules
from solotune.errors import DataError
from solotune.tokenizers import CHATML, Tokenizer

SRC = str(Path(workers.__file__).parents[2])


def write_chats(path: Path, *, rows: int, faults: tuple[int, ...] = ()) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for k in range(rows):
            turns = [
                {"role": "user", "content": f"What is {k} times {k}? " * (k % 7 + 1)},
                {"role": "assistant", "content": f"It is {k * k} <|im_end|>."},
            ]
            row = {"messages": turns, "number": k} if k not in faults else ["not an object"]
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def chatml() -> str:
    return CHATML


@pytest.fixture(autouse=True)
def start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start after few rows, so that small files reach them."""
    monkeypatch.setattr("solotune.data.workers.ROWS_ALONE", 64)
    monkeypatch.setattr("solotune.data.workers.CHUNK", 32)


def test_any_number_of_workers_gives_the_same_samples_and_the_same_facts(
    make_tokenizer: Callable[..., Tokenizer], chatml: str, tmp_path: Path
) -> None:
    path = write_chats(tmp_path / "chats.jsonl", rows=700, faults=(3, 200, 400, 600))
    tokenizer = make_tokenizer(chatml, max_seq_len=190)

    def load(num_workers: int) -> data.SampleSet:
        return data.dataset(tokenizer, source=str(path), on_bad_row="skip", num_workers=num_workers)

    alone, together = load(1), load(3)
    assert alone.report.rows_cut > 0
    assert alone.report.plain_controls == 696
    assert alone.report.rows_unreadable == 4
    assert len(alone) == 696
    assert together.fingerprint() == alone.fingerprint()
    assert together.rows_N.tolist() == alone.rows_N.tolist()
    assert together.report == alone.report
    assert together.lines() == alone.lines()


def test_the_first_bad_row_stops_the_run_whoever_finds_it(
    make_tokenizer: Callable[..., Tokenizer], chatml: str, tmp_path: Path
) -> None:
    path = write_chats(tmp_path / "chats.jsonl", rows=700, faults=(301, 310, 690))
    for num_workers in (1, 2):
        with pytest.raises(DataError, match=r"line 302: .*on_bad_row=skip"):
            data.dataset(make_tokenizer(chatml), source=str(path), num_workers=num_workers)


def test_a_worker_that_is_killed_stops_the_run_in_one_sentence(
    make_tokenizer: Callable[..., Tokenizer], chatml: str
) -> None:
    tokenizer = make_tokenizer(chatml)
    with workers._Workers(tokenizer, Rules(format="text"), 2) as pool:
        os.kill(pool._all[0]._process.pid, signal.SIGKILL)
        answers = [pool.submit([data.Row("row", {"text": "x"})]) for _ in range(2)]
        with pytest.raises(DataError, match=r"ended by SIGKILL.*dataset.num_workers"):
            [answer.result() for answer in answers]


def test_workers_import_neither_torch_nor_the_main_script(tmp_path: Path) -> None:
    """A script without a __main__ guard, as people write them, and the modules of a worker."""
    code = "import solotune.data.workers, sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


SCRIPT = """
import sys
from solotune import data, tokenizers
from solotune.data import workers
workers.ROWS_ALONE, workers.CHUNK = 64, 32
tokenizer = tokenizers.auto(sys.argv[1])
print("started", flush=True)
samples = data.dataset(tokenizer, source=sys.argv[2], num_workers=2, cache_dir=None)
print(len(samples))
"""


def test_a_script_without_a_main_guard_can_use_workers(
    tiny_tokenizer_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = write_chats(tmp_path / "chats.jsonl", rows=300)
    command = [sys.executable, str(script), str(tiny_tokenizer_dir), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["started", "300"], "")


@pytest.mark.skipif(os.name == "nt", reason="signals to a process group")
@pytest.mark.parametrize("how", ["Ctrl-C", "killed"])
def test_workers_end_with_the_process_that_runs_them_and_say_nothing(
    tiny_tokenizer_dir: Path, tmp_path: Path, how: str
) -> None:
    fifo = tmp_path / "chats.jsonl"
    os.mkfifo(fifo)  # rows come for as long as the test wants
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tiny_tokenizer_dir), str(fifo)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    row = json.dumps({"prompt": "x", "completion": "y"}) + "\n"
    stop = threading.Event()

    def feed() -> None:
        try:
            with fifo.open("w") as file:
                while not stop.is_set():
                    file.write(row)
        except BrokenPipeError:
            pass

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    group = process.pid

    def in_group() -> list[str]:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "-g", str(group)], capture_output=True, text=True
        )
        return listed.stdout.split()

    deadline = time.monotonic() + 60
    while len(in_group()) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(in_group()) >= 3
    if how == "killed":
        process.kill()
    else:
        os.killpg(group, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    stop.set()
    if how == "Ctrl-C":  # the script's own; a command prints a sentence
        assert said.count("Traceback") == 1
        assert said.rstrip().endswith("KeyboardInterrupt")
        assert in_group() == []
    else:
        assert said == ""
    while in_group() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert in_group() == []


def test_a_chunk_of_long_rows_holds_few_of_them() -> None:
    def sizes(characters: int) -> list[int]:
        turn = {"role": "user", "content": "x" * characters}
        rows = (data.Row("row", {"messages": [turn]}) for _ in range(100))
        return [len(chunk) for chunk in workers._chunked(rows)]

    assert sizes(10) == [32, 32, 32, 4]
    assert sizes(1 << 17) == [4] * 25
    assert sizes(1 << 20) == [1] * 100
