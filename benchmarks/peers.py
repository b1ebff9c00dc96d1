"""The same fine-tuning by solotune, torchtune and transformers, side by side.

    python benchmarks/peers.py --model models/SmolLM2-135M-Instruct --out docs/benchmarks/peers.md
    python benchmarks/peers.py --method lora --model ... --out docs/benchmarks/peers.md

The second trains an adapter, beside PEFT in transformers' Trainer. Each writes its own figures.

Measures step times and memory peaks, and compares the losses. Each peer gets a fresh virtual
environment from PyPI and trains through its own loop (benchmarks/peers/). The runs alternate, one
at a time, so that a slow minute of the machine hits all of them. Needs Linux and the standard
library.
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from figures import GIB, ROOT, cpu_name, table, write_figures

DRIVERS = Path(__file__).resolve().with_suffix("")

BATCH_SIZE, ROW_LENGTH, SEED = 2, 512, 42
SAMPLING_SECONDS = 0.02
NOISE_SHARE = 0.05  # of the machine's CPU time: above this, step times say little
LOSS_TOLERANCE = 0.05  # bf16 runs of the same work stay within a fifth of it
# Later the curves part: solotune trains norms in fp32, and only there do they move.
COMPARED_STEPS = 3

REQUIREMENTS = {
    "solotune": ("torch==2.13.0", "--editable", str(ROOT)),
    "torchtune": ("torch==2.13.0", "torchao==0.9.0", "torchtune==0.6.1"),
    "transformers": ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0"),
    "peft": ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "peft==0.21.2"),
}


@dataclass(frozen=True)
class Peer:
    """One line of the comparison: a driver and the environment that it runs in."""

    environment: str
    arguments: tuple[str, ...] = ()
    steps_file: str = "steps.jsonl"  # grows by a line a step while the run lasts
    wanted_time: float | None = None  # at most this share of the first reference's step time
    wanted_peak: float | None = None  # at most this share of the first reference's peak


@dataclass(frozen=True)
class Method:
    """What is trained, by whom, and whom the others are compared with."""

    peers: dict[str, Peer]
    references: tuple[str, ...]
    settings: str  # what all of them were told, for the page
    marker: str  # of its figures on the page


LOG = "run/metrics.jsonl"
METHODS = {
    "full": Method(
        {
            "solotune": Peer("solotune", ("compile=False",), LOG, 0.80, 0.85),
            "solotune, compiled": Peer("solotune", ("compile=True",), LOG, 0.67, 0.85),
            "torchtune": Peer("torchtune"),
            "torchtune, compiled": Peer("torchtune", ("--compile",)),
            "transformers": Peer("transformers"),
        },
        references=("torchtune", "transformers"),
        settings="fused torch.optim.AdamW at 2e-5",
        marker="peers.py",
    ),
    "lora": Method(
        {
            "solotune": Peer("solotune", ("--lora", "compile=False"), LOG, 0.80, 0.90),
            "solotune, compiled": Peer("solotune", ("--lora", "compile=True"), LOG, 0.80, 0.90),
            "PEFT": Peer("peft", ("--lora",)),
        },
        references=("PEFT",),
        settings="LoRA of rank 16 in fp32 on all linear layers of the blocks, fused "
        "torch.optim.AdamW at 2e-4",
        marker="peers.py --method lora",
    ),
}
DRIVER_OF = {"peft": "transformers"}  # environments that share another's driver


@dataclass(frozen=True)
class Run:
    """What one training run of one peer left; lists have one entry a step."""

    losses: list[float]
    tokens: list[str]  # digests of the token ids
    num_targets: list[int]
    logged_seconds: list[float]  # by the library's own clock
    arrival_seconds: list[float]  # from one log line to the next, seen from outside: one fewer
    peak_bytes: int  # RssAnon, until the last step is logged
    others_share: float  # of the machine's CPU time, used by other processes meanwhile

    def step_seconds(self, warmup: int) -> float:
        return statistics.median(self.logged_seconds[warmup:])


def main() -> None:
    options = parse_arguments()
    pythons = {
        name: make_environment(options.cache / name, REQUIREMENTS[name])
        for name in environments(options)
    }
    scratch = options.cache / "runs"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)

    packs = options.packs or make_packs(pythons["solotune"], options, scratch)
    work = describe_packs(next(iter(pythons.values())), packs)
    if len(work) != options.steps:
        sys.exit(f"error: {packs} holds {len(work)} steps: use --steps {len(work)}")
    runs: dict[str, list[Run]] = {name: [] for name in options.peers}
    for round_number in range(1, options.rounds + 1):
        for name in options.peers:
            out = scratch / f"{name.replace(', ', '_')}_{round_number}"
            peer = options.method.peers[name]
            run = train(peer, pythons[peer.environment], packs, out, options)
            check_same_work(name, run, work)
            runs[name].append(run)
            print(
                f"round {round_number}  {name:<20} {run.step_seconds(options.warmup):6.2f} s a step"
                f"  peak {run.peak_bytes / 2**30:.2f} GiB  other processes {run.others_share:.0%}",
                flush=True,
            )
    text = report(options, runs, work)
    print(f"\n{text}")
    if options.out:
        write_figures(options.out, text, script=options.method.marker)
    gap = largest_loss_gap(runs, steps=COMPARED_STEPS)
    if gap > LOSS_TOLERANCE:
        sys.exit(f"error: the losses differ by {gap:.3f}: the peers did not do the same work")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--model", type=Path, required=True, help="folder of SmolLM2-135M, in one model.safetensors"
    )
    add("--steps", type=int, default=20, help="optimizer steps of a run")
    add("--warmup", type=int, default=4, help="first steps of a run, which are not timed")
    add("--rounds", type=int, default=3, help="runs of each peer, alternating")
    add("--threads", type=int, default=2)
    add("--method", choices=METHODS, default="full", help="train all weights, or an adapter")
    add("--peers", nargs="+", help="which of the method's peers to run (default: all)")
    add("--cache", type=Path, default="~/.cache/solotune-peers", help="environments and runs")
    add("--packs", type=Path, help="a packs.npz of an earlier run, instead of making it anew")
    add("--out", type=Path, help="Markdown page whose figures are replaced, or which is made")
    options = parser.parse_args()
    if options.steps <= options.warmup:
        parser.error(f"--steps {options.steps} leaves nothing to time after {options.warmup}")
    options.method = METHODS[options.method]
    options.peers = options.peers or list(options.method.peers)
    if unknown := set(options.peers) - set(options.method.peers):
        parser.error(f"--peers {unknown.pop()}: choose among {', '.join(options.method.peers)}")
    if not options.packs and "solotune" not in environments(options):
        parser.error("solotune makes the work: name it among --peers, or give --packs")
    options.model, options.cache = options.model.resolve(), options.cache.expanduser().resolve()
    return options


def environments(options: argparse.Namespace) -> list[str]:
    """The environments that the peers run in, in the order of REQUIREMENTS."""
    needed = {options.method.peers[name].environment for name in options.peers}
    return [name for name in REQUIREMENTS if name in needed]


def make_environment(folder: Path, requirements: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment, made anew unless it is there with these pins."""
    stamp, python = folder / "requirements.txt", folder / "bin" / "python"
    wanted = "\n".join((platform.python_version(), *requirements))
    if str(ROOT) in requirements:  # an editable install follows the code, not its dependencies
        wanted += f"\n{hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {' '.join(requirements)} into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-qq", *requirements], check=True)
    stamp.write_text(wanted)  # last: a half-made environment has none
    return python


def make_packs(python: Path, options: argparse.Namespace, scratch: Path) -> Path:
    """Return the file of the shared work, made by solotune's data path."""
    packs = scratch / "packs.npz"
    numbers = map(str, (options.steps, BATCH_SIZE, ROW_LENGTH, SEED))
    subprocess.run([python, DRIVERS / "make_packs.py", options.model, packs, *numbers], check=True)
    return packs


def describe_packs(python: Path, packs: Path) -> list[dict]:
    """Return digest and counts of each step; asks a peer's interpreter, which has NumPy."""
    command = [python, DRIVERS / "packs.py", packs]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def train(peer: Peer, python: Path, packs: Path, out: Path, options: argparse.Namespace) -> Run:
    """Run one peer once, watching its memory and its log from outside."""
    out.mkdir()
    driver = DRIVERS / f"run_{DRIVER_OF.get(peer.environment, peer.environment)}.py"
    command = [python, driver, packs.resolve(), options.model, out, *peer.arguments]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(options.threads),
        "MKL_NUM_THREADS": str(options.threads),
        "CUDA_VISIBLE_DEVICES": "",  # all on the CPU
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
        "TORCHINDUCTOR_CACHE_DIR": str(out.parent / f"inductor_{peer.environment}"),
    }
    busy, own, start = busy_seconds(), own_seconds(), time.monotonic()
    with (out / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=out, stdout=output, stderr=subprocess.STDOUT
        )
        peak_bytes, arrivals = watch(process, out / peer.steps_file, options.steps)
    if process.returncode:
        print((out / "output.txt").read_text(errors="replace")[-3000:])
        sys.exit(f"error: {driver.name} ended with {process.returncode}: see {out}/output.txt")
    available = (time.monotonic() - start) * (os.cpu_count() or 1)
    others = (busy_seconds() - busy) - (own_seconds() - own)
    for weights in out.rglob("*.safetensors"):
        weights.unlink()  # a gigabyte a run
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return Run(
        losses=[row["loss"] for row in rows],
        tokens=[row["tokens"] for row in rows],
        num_targets=[row["num_targets"] for row in rows],
        logged_seconds=[row["seconds"] for row in rows],
        arrival_seconds=[later - earlier for earlier, later in itertools.pairwise(arrivals)],
        peak_bytes=peak_bytes,
        others_share=max(0.0, others / available),
    )


def watch(process: subprocess.Popen, steps_file: Path, steps: int) -> tuple[int, list[float]]:
    """Wait for the end; return the peak of RssAnon in bytes and when each step was logged.

    The peak counts up to the last step: saving is not part of the work that is compared.
    """
    peak_bytes, arrivals = 0, []
    while process.poll() is None:
        if len(arrivals) < steps:
            peak_bytes = max(peak_bytes, anonymous_bytes(process.pid))
            if steps_file.exists():
                new = steps_file.read_bytes().count(b'"loss"') - len(arrivals)
                arrivals += [time.monotonic()] * new
        time.sleep(SAMPLING_SECONDS)
    return peak_bytes, arrivals


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs: mapped weights do not count, copies of them do."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def busy_seconds() -> float:
    """CPU time of all processes since the machine started, and of what its host took away."""
    ticks = Path("/proc/stat").read_text().split()[1:9]
    user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, ticks)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU time of this script and of the runs that it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def check_same_work(name: str, run: Run, work: list[dict]) -> None:
    """Stop unless each step had the token ids and the number of targets that were due."""
    done = zip(run.tokens, run.num_targets, strict=True)
    due = ((step["tokens"], step["num_targets"]) for step in work)
    for step, (was, should) in enumerate(itertools.zip_longest(done, due), start=1):
        if was != should:
            sys.exit(f"error: step {step} of {name} had (tokens, targets) {was}, not {should}")


def largest_loss_gap(runs: dict[str, list[Run]], *, steps: int) -> float:
    """The largest difference between any two runs' losses at one of the first `steps`."""
    curves = zip(*(run.losses[:steps] for of_peer in runs.values() for run in of_peer), strict=True)
    return max(max(losses) - min(losses) for losses in curves)


def report(options: argparse.Namespace, runs: dict[str, list[Run]], work: list[dict]) -> str:
    """The Markdown of the docs page: conditions, figures, rounds, losses."""
    noise = max(run.others_share for of_peer in runs.values() for run in of_peer)
    loud = f"**The machine was not quiet (others up to {noise:.0%}): measure again.**"
    parts = [
        conditions(options),
        *([loud] if noise > NOISE_SHARE else []),
        figures_table(runs, options.method, options.warmup),
        f"Seconds a step, `logged` by the library itself and `seen` from outside between log "
        f"lines: medians of steps {options.warmup + 1} to {options.steps}, then of "
        f"{options.rounds} rounds. Peak: RssAnon. By round, with the share of the machine's CPU "
        f"time that other processes used meanwhile:",
        rounds_table(runs, options.warmup),
        "Losses of the first round. Every run reported these digests of token ids and these "
        "target counts:",
        losses_table(runs, work),
        "Largest difference between any two runs at one of the first "
        f"{COMPARED_STEPS} steps: {largest_loss_gap(runs, steps=COMPARED_STEPS):.4f}.",
    ]
    return "\n\n".join(parts)


def conditions(options: argparse.Namespace) -> str:
    """Where, when and with what this was measured."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    pins = (pin for name in environments(options) for pin in REQUIREMENTS[name])
    versions = ", ".join(dict.fromkeys(pin for pin in pins if "==" in pin))
    return "  \n".join(
        (
            f"{date.today()}, {cpu_name()}, {os.cpu_count()} cores, "
            f"{memory_gib:.0f} GiB, Linux {platform.release()}, {options.threads} threads.",
            f"solotune at {commit or 'an unknown commit'}, {versions}, "
            f"Python {platform.python_version()}.",
            f"{options.model.name}, bf16, {BATCH_SIZE} x {ROW_LENGTH} tokens packed, full "
            f"activation checkpointing, {options.method.settings}, {options.steps} steps.",
        )
    )


def figures_table(runs: dict[str, list[Run]], method: Method, warmup: int) -> str:
    """Step times and peaks, and their ratios to the references."""
    median = statistics.median
    seconds = {n: median(run.step_seconds(warmup) for run in of) for n, of in runs.items()}
    peaks = {n: median(run.peak_bytes for run in of) / 2**30 for n, of in runs.items()}
    references = [name for name in method.references if name in runs]
    header = ["", "logged s", "seen s", "peak GiB"]
    for what in ("time", "peak"):
        header += [f"{what} / {reference}" for reference in references] + ["wanted"]
    rows = []
    for name, of_peer in runs.items():
        seen = median(s for run in of_peer for s in run.arrival_seconds[max(warmup - 1, 0) :])
        row = [name, f"{seconds[name]:.2f}", f"{seen:.2f}", f"{peaks[name]:.2f}"]
        wanted = method.peers[name].wanted_time, method.peers[name].wanted_peak
        for measured, limit in zip((seconds, peaks), wanted, strict=True):
            row += [f"{measured[name] / measured[reference]:.2f}" for reference in references]
            row.append(f"{limit:.2f}" if limit else "")
        rows.append(row)
    return table(header, rows)


def rounds_table(runs: dict[str, list[Run]], warmup: int) -> str:
    """The median step time of every single run."""
    rows = [
        [f"{i}", *(f"{run.step_seconds(warmup):.2f} ({run.others_share:.0%})" for run in of_round)]
        for i, of_round in enumerate(zip(*runs.values(), strict=True), start=1)
    ]
    return table(["round", *runs], rows)


def losses_table(runs: dict[str, list[Run]], work: list[dict]) -> str:
    """The loss curves, beside what each step consisted of."""
    curves = zip(*(of_peer[0].losses for of_peer in runs.values()), strict=True)
    rows = [
        [f"{i}", step["tokens"], f"{step['num_tokens']}", f"{step['num_targets']}"]
        + [f"{loss:.4f}" for loss in losses]
        for i, (step, losses) in enumerate(zip(work, curves, strict=True), start=1)
    ]
    return table(["step", "token ids", "tokens", "targets", *runs], rows)


if __name__ == "__main__":
    main()
