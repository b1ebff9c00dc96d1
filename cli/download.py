"""`tune download`: a model of the Hugging Face Hub into a folder."""

import re
import shutil
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from solotune.config.command_line import Parser
from solotune.errors import CheckpointError, ConfigError, UsageError

HELP = """\
Fetch a model from the Hugging Face Hub into a folder, by default ./models/NAME.

  tune download HuggingFaceTB/SmolLM2-135M-Instruct
  tune download meta-llama/Llama-3.2-1B-Instruct --hf-token hf_...

The same command again fetches the files that are missing or have changed since. Files that hold
the same weights once more are left out:
{ignored}
and .bin or consolidated weights beside .safetensors. --ignore-patterns takes the place of these.

A token is read from --hf-token, from HF_TOKEN, or from where `hf auth login` left it."""

# The same weights for other programs.
IGNORED = (
    *("original/*", "metal/*", "onnx/*", "openvino/*", "coreml/*"),
    *("*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.tflite"),
)
# The same weights once more where there are model*.safetensors.
IGNORED_BESIDE_SAFETENSORS = ("*.bin", "*.pt", "consolidated*.safetensors")

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MARK = ".downloaded_from"
_NETWORK_LIBRARIES = ("httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3")


def main(words: list[str]) -> int:
    """Download the model and print its folder."""
    help_text = HELP.format(ignored=" ".join(IGNORED))
    parser = Parser(prog="tune download", description=help_text)
    parser.add_argument("repo", metavar="OWNER/NAME", help="the model as the Hub names it")
    parser.add_argument("--output-dir", type=Path, help="the folder, instead of ./models/NAME")
    parser.add_argument("--hf-token", metavar="TOKEN", help="for gated and private models")
    parser.add_argument("--revision", default="main", help="a branch, tag or commit")
    parser.add_argument(
        "--ignore-patterns", nargs="*", metavar="PATTERN", help="leave out files that match one"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(words)
    repo = options.repo.removeprefix("https://huggingface.co/").rstrip("/")
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{options.repo}: name a model as OWNER/NAME, as the Hub does")
    folder = options.output_dir or Path("models", repo.partition("/")[2])
    download(
        repo,
        folder.expanduser(),
        revision=options.revision,
        token=options.hf_token,
        ignore_patterns=options.ignore_patterns,
    )
    return 0


def download(
    repo: str,
    folder: Path,
    *,
    revision: str = "main",
    token: str | None = None,
    ignore_patterns: list[str] | None = None,
) -> None:
    """Fetch a repository's files into `folder`; raises CheckpointError that says what to do.

    `ignore_patterns` None leaves out what holds the same weights twice.
    """
    from huggingface_hub import HfApi, snapshot_download  # only here: it is slow to import

    _check_folder(folder, repo)
    try:
        api = HfApi(token=token, library_name="solotune")
        info = api.model_info(repo, revision=revision, files_metadata=True)
    except Exception as error:
        raise _explained(error, repo, revision=revision, has_token=bool(token)) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    names = wanted_files(list(sizes), ignore_patterns)
    if not names:
        raise CheckpointError(f"{repo} has no file that --ignore-patterns does not leave out")
    missing = sum(sizes[name] for name in names if _size(folder / name) != sizes[name])
    print(
        f"{repo}: {len(names)} of {len(sizes)} files, {_gb(sum(sizes[name] for name in names))},"
        f" {_gb(missing)} to fetch"
    )
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise CheckpointError(
            f"{folder}: {_gb(missing)} do not fit in the {_gb(free)} that are free: free some, or"
            " name a folder on another disk with --output-dir"
        )
    (folder / _MARK).write_text(f"{repo}\n", encoding="utf-8")
    try:
        snapshot_download(
            repo,
            revision=info.sha,
            local_dir=folder,
            token=token,
            allow_patterns=[escape(name) for name in names],
            library_name="solotune",
        )
    except Exception as error:
        raise _explained(error, repo, revision=revision, has_token=bool(token)) from error
    # without a network the library is content with a folder that holds something
    cut = [name for name in names if _size(folder / name) != sizes[name]]
    if cut:
        raise CheckpointError(
            f"{folder}/{cut[0]} is not complete ({len(cut)} such files): the same command goes on"
        )
    print(f"{folder}: complete, commit {info.sha}; use it with checkpoint_dir={folder}")


def wanted_files(names: list[str], ignore_patterns: list[str] | None = None) -> list[str]:
    """Return the names that no pattern matches; raises CheckpointError for one that leads outside.

    `ignore_patterns` None leaves out what holds the same weights twice.
    """
    patterns = ignore_patterns
    if patterns is None:
        has_safetensors = any(fnmatchcase(name, "model*.safetensors") for name in names)
        patterns = [*IGNORED, *(IGNORED_BESIDE_SAFETENSORS if has_safetensors else ())]
    wanted = [n for n in names if not any(fnmatchcase(n, pattern) for pattern in patterns)]
    for name in wanted:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\\" in name or ":" in name:
            raise CheckpointError(f"{name!r} in the repository leads out of its folder: refused")
    return wanted


def _check_folder(folder: Path, repo: str) -> None:
    """Raise ConfigError for a folder that holds something else: two models would mix."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a folder with --output-dir")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    mark = folder / _MARK
    source = mark.read_text(encoding="utf-8").strip() if mark.is_file() else ""
    if source != repo:
        held = f"holds {source}" if source else "is not empty and was not made by this command"
        raise ConfigError(f"{folder} {held}: name another folder with --output-dir")


def _explained(error: Exception, repo: str, *, revision: str, has_token: bool) -> Exception:
    """Return the error as one sentence, or itself where it is a fault of ours."""
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT

    token = "pass --hf-token or set HF_TOKEN"
    again = "the same command goes on with what is missing"
    if isinstance(error, errors.GatedRepoError):
        what = f"accept its terms at {ENDPOINT}/{repo}"
        then = "the token's account has no access yet" if has_token else f"then {token}"
        return CheckpointError(f"{repo} is gated: {what}; {then} ({ENDPOINT}/settings/tokens)")
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{repo} has no revision {revision}: see {ENDPOINT}/{repo}/commits")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{repo}: the Hub has no such model, or it is private: check the name, and for a"
            f" private model {token}"
        )
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return CheckpointError(f"{repo}: the Hub refuses the token (HTTP {status}): {token} anew")
    if status is not None:
        return CheckpointError(f"{repo}: the Hub answers HTTP {status}: try later; {again}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return CheckpointError(f"{repo}: HF_HUB_OFFLINE is set: unset it to download")
    library = type(error).__module__.partition(".")[0]
    if library in _NETWORK_LIBRARIES or isinstance(error, errors.LocalEntryNotFoundError):
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return CheckpointError(
            f"{repo}: {ENDPOINT} cannot be reached ({reason}): check the network; {again}"
        )
    return error


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 5e6 else f"{size_bytes / 1e3:.0f} kB"
