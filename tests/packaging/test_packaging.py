"""Wheel, sdist and editable install hold the same package: the one of the tree."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")


def files_of_the_tree() -> set[str]:
    """The path inside the package of every module and every YAML."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml"):
                inside = path.relative_to(ROOT / folder).as_posix()
                found.add(f"{package.replace('.', '/')}/{inside}")
    return found


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    script = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    return target / run(sys.executable, "-c", script, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built from, so that nothing is left in the tree."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def check_install(python: Path | str, cwd: Path, home: Path, **environment: str) -> None:
    """Every package is found below `home`, and the command lists what the tree holds."""
    packages = SETTINGS["tool"]["setuptools"]["packages"]
    script = (
        "import json, sys; from importlib.util import find_spec;"
        f"print(json.dumps([find_spec(name).origin for name in {packages!r}]))"
    )
    for origin in json.loads(run(python, "-c", script, cwd=cwd, **environment)):
        assert Path(origin).is_relative_to(home), origin
    rows = json.loads(run(python, "-m", "solotune", "ls", "--json", cwd=cwd, **environment))
    listed = {config for row in rows for config in row["configs"]}
    configs = (ROOT / "recipe_configs").rglob("*.yaml")
    assert listed == {
        p.relative_to(ROOT / "recipe_configs").with_suffix("").as_posix() for p in configs
    }
    assert {row["recipe"] for row in rows} == {
        path.stem for path in (ROOT / "recipes").glob("[!_]*.py")
    }


def test_the_listed_packages_are_those_of_the_tree():
    assert SETTINGS["tool"]["setuptools"]["packages"] == sorted(
        name.removesuffix("/__init__.py").replace("/", ".")
        for name in files_of_the_tree()
        if name.endswith("/__init__.py")
    )
    files = files_of_the_tree()
    folders = {Path(name).parent.as_posix() for name in files if name.endswith(".py")}
    assert {f"{folder}/__init__.py" for folder in folders} <= files


def test_the_wheel_holds_every_file_and_runs(source: Path, tmp_path: Path):
    wheel = build("wheel", source, tmp_path)
    archive = zipfile.ZipFile(wheel)
    held = {name for name in archive.namelist() if name.startswith("solotune/")}
    assert held == files_of_the_tree()
    archive.extractall(tmp_path / "installed")
    entry = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "tune = solotune.cli.main:main" in archive.read(entry).decode()
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    home = tmp_path / "installed"
    check_install(sys.executable, tmp_path, home, PYTHONPATH=str(home))


def test_the_wheel_of_the_sdist_holds_every_file(source: Path, tmp_path: Path):
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = next(path for path in tmp_path.iterdir() if path.is_dir())
    wheel = build("wheel", unpacked, tmp_path)
    held = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("solotune/")}
    assert held == files_of_the_tree()


def test_an_editable_install_follows_the_files(source: Path, tmp_path: Path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    run(*pip, build("editable", source, tmp_path), cwd=tmp_path)
    # the dependencies of this interpreter, without its own editable installs
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    (Path(site) / "dependencies.pth").write_text(str(Path(yaml.__file__).parents[1]))

    check_install(python, tmp_path, source)
    added = source / "recipes" / "added.py"
    added.write_text('"""Added after the install."""\n')
    rows = run(python, "-m", "solotune", "ls", cwd=tmp_path)
    added.unlink()
    assert "Added after the install." in rows


def test_the_library_imports_neither_recipes_nor_the_command():
    for path in (ROOT / "src").rglob("*.py"):
        if path.name == "__main__.py":
            continue
        text = path.read_text(encoding="utf-8")
        for name in ("solotune.recipes", "solotune.cli", "solotune.recipe_configs"):
            assert f"import {name}" not in text, path
            assert f"from {name}" not in text, path


def test_every_library_that_is_imported_is_a_dependency():
    extras = SETTINGS["project"]["optional-dependencies"]
    named = SETTINGS["project"]["dependencies"] + extras["gguf"] + extras["plot"]
    declared = {re.split(r"[^\w-]", word)[0] for word in named}
    other_names = {"yaml": "pyyaml", "markupsafe": "jinja2"}  # which is built on it
    for folder in ("src", "cli", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    modules = [node.module or ""]
                else:
                    continue
                for module in {name.partition(".")[0] for name in modules}:
                    if module not in sys.stdlib_module_names and module != "solotune":
                        assert other_names.get(module, module) in declared, path
