"""`tune env`: what a report of a fault needs to say about the machine."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import solotune
from solotune.config.command_line import Parser

HELP = """\
Print versions, devices, driver, memory and cores: paste it into a report of a fault.

Of the environment only what changes a run is shown, and of tokens only whether they are set."""

_PACKAGES = (
    *("torch", "torchao", "bitsandbytes", "triton", "safetensors", "tokenizers", "sentencepiece"),
    *("tiktoken", "datasets", "huggingface_hub", "transformers", "peft", "numpy"),
)
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS"),
    *("CUBLAS_WORKSPACE_CONFIG", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
)
_SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
_GIB = 2**30


def main(words: list[str]) -> int:
    """Print the facts, a line each or as one object."""
    parser = Parser(prog="tune env", description=HELP)
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    facts = environment()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            values = [", ".join(f"{key} {found}" for key, found in value.items())]
        for each in values:
            print(f"{name}: {each}")
    return 0


def environment() -> dict[str, Any]:
    """Return the facts by name; one that cannot be found out says why."""
    facts: dict[str, Any] = {
        "solotune": f"{solotune.__version__} in {Path(solotune.__file__).parent}",
        "python": f"{platform.python_version()} in {sys.prefix}",
        "system": platform.platform(),
        "packages": {name: found for name in _PACKAGES if (found := package(name))},
        "cores": cores(),
        "host memory": host_memory(),
        "free disk": f"{shutil.disk_usage('.').free / _GIB:.1f} GiB in {Path.cwd()}",
    }
    try:
        facts |= devices()
    except Exception as error:  # a broken torch is what the report is about
        facts["devices"] = f"torch cannot be used: {type(error).__name__}: {error}"
    facts["driver"] = driver()
    shown = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    secrets = {name: "is set" for name in _SECRETS if os.environ.get(name)}
    facts["environment"] = shown | secrets or "nothing that changes a run"
    return facts


def package(name: str) -> str | None:
    """Return the installed version of a package, None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cores() -> str:
    """Return the number of cores, and of those that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    limited = f", {usable} of them for this process" if usable not in (None, os.cpu_count()) else ""
    return f"{os.cpu_count()} ({platform.machine()}){limited}"


def host_memory() -> str:
    """Return the memory of the machine, what of it is free, and a container's limit."""
    if sys.platform == "win32":
        import psutil

        memory = psutil.virtual_memory()
        return f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB available"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{total / _GIB:.1f} GiB"
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            text += f", {int(line.split()[1]) * 1024 / _GIB:.1f} GiB available"
    for line in _lines("/sys/fs/cgroup/memory.max"):
        if line.strip().isdigit() and int(line) < total:
            text += f", a limit of {int(line) / _GIB:.1f} GiB on this container"
    return text


def devices() -> dict[str, Any]:
    """Return what torch can compute on."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            f"cuda:{index} {card.name}, {total / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free,"
            f" compute capability {card.major}.{card.minor}"
        )
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found.append(f"xpu {torch.xpu.get_device_name()}")
    if torch.backends.mps.is_available():
        found.append("mps")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return {
        "torch": f"{torch.__version__}, {built}, {torch.get_num_threads()} threads",
        "devices": found or ["cpu alone"],
    }


def driver() -> str:
    """Return the version of the NVIDIA driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi"
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi cannot be run: {error}"
    lines = sorted(set((done.stdout if done.returncode == 0 else done.stderr).split("\n")) - {""})
    return ", ".join(lines) or f"nvidia-smi ended with {done.returncode}"


def _lines(path: str) -> list[str]:
    """Return the lines of a file of the system, none where there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
