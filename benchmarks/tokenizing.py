"""How long 100 000 short chats take from file to packed batches, against `tokenizers` alone.

    python benchmarks/tokenizing.py models/SmolLM2-135M-Instruct [--rows 100000] [--workers 2]
        [--rounds 3] [--write docs/benchmarks/tokenizing.md]

Four cases, each in a process of its own, in turn:

    encode     `Tokenizer.encode_batch` of the tokenizers library on the rendered texts, 1000 at a
               time, with as many threads as we take workers; the texts are in memory before
    first      solotune.data.dataset and make_loader on the jsonl file of the same chats: reading,
               checking, rendering, encoding, masks, cache, packing
    second     the same again, from the cache
    a quarter  `first` with a quarter of the rows: what memory grows with

Seconds are of the work, after the imports, medians of the rounds. Memory is anonymous memory at its
peak, of the process and of its largest worker: mapped files come and go as the system likes. The
chats are made on the spot: a question and three paragraphs out of the docstrings of Python's
standard library, in any combination.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from figures import MIB, conditions, cpu_name, table, write_figures

MAX_SEQ_LEN = 2048


def write_chats(path: Path, rows: int) -> None:
    """Write `rows` chats of about 120 tokens."""
    from solotune.data.pydoc import _rows

    pairs = [(row.columns["prompt"], row.columns["completion"]) for row in _rows("all")]
    paragraphs = [answer.split("\n\n")[0] for _, answer in pairs]
    choose = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            question = f"{choose.choice(pairs)[0]} This is question {number}."
            answer = " ".join(choose.choice(paragraphs) for _ in range(3))
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


class PeakMemory(threading.Thread):
    """Watches the anonymous memory of this process and of its children, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.own, self.worker = 0, 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.1):
            self.own = max(self.own, anonymous_bytes("self"))
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            self.worker = max([self.worker, *(anonymous_bytes(child) for child in children)])

    def stop(self) -> None:
        self._done.set()
        self.join()


def anonymous_bytes(pid: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def encode(model: Path, chats: Path, workers: int) -> dict:
    """Encode the rendered texts with the tokenizers library alone."""
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    import tokenizers

    from solotune.tokenizers import auto

    template = auto(model).require_template()
    texts = []
    with chats.open(encoding="utf-8") as file:
        for line in file:
            texts.append(template.render(json.loads(line)["messages"]))
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    memory = PeakMemory()
    memory.start()
    start, num_tokens = time.perf_counter(), 0
    for k in range(0, len(texts), 1000):
        encodings = tokenizer.encode_batch(texts[k : k + 1000], add_special_tokens=False)
        num_tokens += sum(len(encoding) for encoding in encodings)
    seconds = time.perf_counter() - start
    memory.stop()
    return {"seconds": seconds, "tokens": num_tokens, "own": memory.own, "worker": 0}


def load(model: Path, chats: Path, workers: int) -> dict:
    """Samples and loader, as a run makes them."""
    from solotune.data import dataset, make_loader
    from solotune.tokenizers import auto

    memory = PeakMemory()
    memory.start()
    start = time.perf_counter()
    tokenizer = auto(model, max_seq_len=MAX_SEQ_LEN)
    cache_dir = str(chats.parent / "cache")
    samples = dataset(tokenizer, source=str(chats), num_workers=workers, cache_dir=cache_dir)
    loader = make_loader(samples, batch_size=1, max_seq_len=MAX_SEQ_LEN, seed=42)
    next(loader.plan(0).batches())
    seconds = time.perf_counter() - start
    memory.stop()
    return {
        "seconds": seconds,
        "tokens": loader.num_tokens,
        "own": memory.own,
        "worker": memory.worker,
        "facts": samples.lines(),
        "filled": loader.num_tokens / loader.num_slots,
        "torch": "torch" in sys.modules,
    }


def measure(case: str, model: Path, chats: Path, workers: int) -> dict:
    """Run a case in a new process."""
    words = [sys.executable, __file__, str(model), "--case", case, "--chats", str(chats)]
    done = subprocess.run(
        [*words, "--workers", str(workers)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def middle(results: list[dict]) -> dict:
    """Return the run of median time, with the highest memory of all runs."""
    ordered = sorted(results, key=lambda result: result["seconds"])
    peaks = {key: max(result[key] for result in results) for key in ("own", "worker")}
    return ordered[len(ordered) // 2] | peaks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with tokenizer.json and a chat template")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="the page whose figures are replaced")
    parser.add_argument("--case", choices=["encode", "load"], help=argparse.SUPPRESS)
    parser.add_argument("--chats", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run = {"encode": encode, "load": load}[options.case]
        print(json.dumps(run(options.model, options.chats, options.workers)))
        return

    with tempfile.TemporaryDirectory() as folder:
        few, chats = Path(folder, "few.jsonl"), Path(folder, "chats.jsonl")
        write_chats(few, options.rows // 4)
        write_chats(chats, options.rows)
        plan = {
            "encode": ("encode", chats),
            "first": ("load", chats),
            "second": ("load", chats),
            "a quarter": ("load", few),
        }
        runs: dict[str, list[dict]] = {name: [] for name in plan}
        for _ in range(options.rounds):
            shutil.rmtree(Path(folder, "cache"), ignore_errors=True)
            for name, (case, path) in plan.items():
                runs[name].append(measure(case, options.model, path, options.workers))
                print(f"{name}: {runs[name][-1]['seconds']:.2f} s", file=sys.stderr)
    found = {name: middle(results) for name, results in runs.items()}
    reference = found["encode"]["seconds"]
    rows = [
        [
            name,
            f"{result['seconds']:.2f}",
            f"{result['seconds'] / reference:.2f}" if name != "a quarter" else "-",
            f"{result['tokens'] / result['seconds'] / 1e6:.2f}",
            f"{result['own'] / MIB:.0f}",
            f"{result['worker'] / MIB:.0f}" if result["worker"] else "-",
        ]
        for name, result in found.items()
    ]
    header = ["case", "seconds", "of encode", "M tokens/s", "MiB", "MiB of a worker"]
    text = "\n\n".join(
        [
            conditions(f"CPU: {cpu_name()}", "tokenizers", "jinja2", "numpy"),
            f"{options.rows:,} chats, {found['first']['tokens']:,} tokens, {options.workers} "
            f"workers and threads, medians of {options.rounds} rounds; packs of {MAX_SEQ_LEN} "
            f"tokens are {100 * found['first']['filled']:.1f} % full.",
            table(header, rows),
        ]
    )
    print(text)
    if options.write:
        write_figures(options.write, text, script="tokenizing.py")


if __name__ == "__main__":
    main()
