"""`tune env`: the facts of a report, without secrets, also where torch is broken."""

import json
import sys
from pathlib import Path

import pytest
import torch

from solotune import __version__
from solotune.cli import env  # pyright: ignore[reportMissingImports]
from solotune.cli.main import main  # pyright: ignore[reportMissingImports]


def test_it_names_versions_cores_memory_and_devices(capsys: pytest.CaptureFixture):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["solotune"].startswith(f"{__version__} in ")
    assert facts["packages"]["torch"] == torch.__version__
    assert "safetensors" in facts["packages"]
    assert facts["torch"].startswith(f"{torch.__version__}, built")
    assert "GiB" in facts["host memory"]
    assert facts["cores"][0].isdigit()
    if not torch.cuda.is_available():
        assert "cuda" not in str(facts["devices"])
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.partition(": ")[0] for line in lines}
    assert {"solotune", "python", "packages", "torch", "devices", "driver"} <= names


def test_a_token_is_never_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "verysecret" not in out
    assert "HF_TOKEN is set" in out
    assert "OMP_NUM_THREADS 3" in out


def test_a_broken_torch_is_a_fact(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["env"]) == 0
    assert "devices: torch cannot be used: ModuleNotFoundError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 555.42.06; echo 555.42.06", "555.42.06"),
        ("echo NVML: driver mismatch >&2; exit 18", "NVML: driver mismatch"),
        ("exit 3", "nvidia-smi ended with 3"),
    ],
)
def test_the_driver_is_that_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(env.shutil, "which", lambda name: str(program))
    assert env.driver() == expected


def test_the_limit_of_a_container_is_told(monkeypatch: pytest.MonkeyPatch):
    files = {
        "/proc/meminfo": ["MemTotal: 1 kB", "MemAvailable: 2097152 kB"],
        "/sys/fs/cgroup/memory.max": ["1073741824"],
    }
    monkeypatch.setattr(env, "_lines", lambda path: files[path])
    assert env.host_memory().endswith("2.0 GiB available, a limit of 1.0 GiB on this container")
    monkeypatch.setattr(env, "_lines", lambda path: ["max"] if "cgroup" in path else [])
    assert "limit" not in env.host_memory()
