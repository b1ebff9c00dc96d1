"""`tune download` from a server on this machine that answers as the Hugging Face Hub does."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from solotune.cli.download import wanted_files  # pyright: ignore[reportMissingImports]
from solotune.errors import CheckpointError

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 2000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"the same weights",
    "original/consolidated.00.pth": b"the same weights",
    "onnx/model.onnx": b"the same weights",
    "model-q4.gguf": b"the same weights",
    "README.md": b"# A model",
}


class Hub(ThreadingHTTPServer):
    """Serves `team/model`; `team/gated` needs the token `good`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = dict(FILES)
        self.sha = SHA
        self.breaks = False  # the connection, once, at half of the weights
        self.is_down = False  # for the weights
        self.requests: list[str] = []


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, b"{}", X_Error_Code=code, X_Error_Message=code)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}")
        if "/team/gated" in path and self.headers.get("Authorization") != "Bearer good":
            return self.refuse(403, "GatedRepo")
        if "/broken" in path:
            return self.reply(500, b"{}")
        path = path.replace("/team/gated", "/team/model")
        if not re.match(r"(/api/models)?/team/model(/|$)", path):
            return self.refuse(404, "RepoNotFound")
        if path.startswith("/api/models/team/model/tree/"):
            return self.reply(200, json.dumps(self.tree()).encode())
        if path.startswith("/api/models/"):
            if path.rpartition("/")[2] not in ("main", "model", self.server.sha):
                return self.refuse(404, "RevisionNotFound")
            siblings = [{"rfilename": f["path"], "size": f["size"]} for f in self.tree()]
            body = {"id": "team/model", "sha": self.server.sha, "siblings": siblings}
            return self.reply(200, json.dumps(body).encode())
        return self.file(path.partition(f"/resolve/{self.server.sha}/")[2])

    def tree(self) -> list[dict]:
        return [
            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for name, body in self.server.files.items()
        ]

    def file(self, name: str) -> None:
        body = self.server.files[name]
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X_Repo_Commit": self.server.sha}
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        is_weights = self.command == "GET" and name == "model.safetensors"
        if is_weights and self.server.is_down:
            self.reply(500, b"")
        elif is_weights and self.server.breaks:
            self.server.breaks = False
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif start:
            at = int(start[1])
            span = f"bytes {at}-{len(body) - 1}/{len(body)}"
            self.reply(206, body[at:], Content_Range=span, **headers)
        else:
            self.reply(200, body, Accept_Ranges="bytes", **headers)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def tune(hub: Hub, cwd: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-m", "solotune", "download", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={
            **kept,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(cwd / "hf_home"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **environment,
        },
        timeout=120,
    )


def held(folder: Path) -> dict[str, bytes]:
    """The files of a folder that are not hidden."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    named = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in named.items() if not name.startswith(".")}


def test_a_model_arrives_without_its_duplicates_and_again_costs_nothing(hub: Hub, tmp_path: Path):
    done = tune(hub, tmp_path, "team/model")
    assert done.returncode == 0, done.stderr
    kept = ("config.json", "model.safetensors", "tokenizer.json", "README.md")
    assert held(tmp_path / "models/model") == {name: FILES[name] for name in kept}
    assert "team/model: 4 of 8 files, 512 kB, 512 kB to fetch" in done.stdout
    assert "use it with checkpoint_dir=models/model" in done.stdout

    hub.requests.clear()
    done = tune(hub, tmp_path, "https://huggingface.co/team/model")
    assert (done.returncode, "0 kB to fetch" in done.stdout) == (0, True)
    assert not [request for request in hub.requests if request.startswith("GET /team")]

    hub.files["config.json"], hub.sha = b'{"model_type": "smollm3"}', SHA[::-1]
    assert tune(hub, tmp_path, "team/model").returncode == 0
    assert (tmp_path / "models/model/config.json").read_bytes() == hub.files["config.json"]


def test_patterns_folder_and_revision_of_ones_own(hub: Hub, tmp_path: Path):
    words = ("--output-dir", "mine", "--revision", SHA, "--ignore-patterns", "*.md", "o*/*")
    done = tune(hub, tmp_path, "team/model", *words)
    assert done.returncode == 0, done.stderr
    assert held(tmp_path / "mine").keys() == {
        *("config.json", "model.safetensors", "tokenizer.json"),
        *("pytorch_model.bin", "model-q4.gguf"),
    }


def fetched(hub: Hub) -> list[str]:
    """The files whose bytes were asked for, with the range."""
    gets = [r.partition("/resolve/")[2] for r in hub.requests if r.startswith("GET /team")]
    return sorted(r.partition("/")[2].strip() for r in gets)


def test_a_broken_connection_goes_on_within_the_file(hub: Hub, tmp_path: Path):
    weights = hub.files["model.safetensors"] = bytes(range(256)) * 100_000  # 25.6 MB
    hub.breaks = True
    done = tune(hub, tmp_path, "team/model")
    assert done.returncode == 0, done.stderr
    assert held(tmp_path / "models/model")["model.safetensors"] == weights
    again = re.fullmatch(r"model.safetensors bytes=(\d+)-", fetched(hub)[-2])
    assert again, fetched(hub)
    assert int(again[1]) >= 10_000_000


def test_the_same_command_again_fetches_what_is_missing(hub: Hub, tmp_path: Path):
    hub.is_down = True
    done = tune(hub, tmp_path, "team/model")
    assert done.returncode == 1
    error = "error: team/model: the Hub answers HTTP 500: try later; the same command goes on with"
    assert done.stderr.splitlines()[-1].startswith(error)
    assert "model.safetensors" not in held(tmp_path / "models/model")
    (tmp_path / "models/model/tokenizer.json").unlink()
    hub.is_down = False
    hub.requests.clear()
    assert tune(hub, tmp_path, "team/model").returncode == 0
    assert fetched(hub) == ["model.safetensors", "tokenizer.json"]
    assert held(tmp_path / "models/model")["model.safetensors"] == FILES["model.safetensors"]


def test_a_gated_model_is_explained_and_opens_with_a_token(hub: Hub, tmp_path: Path):
    done = tune(hub, tmp_path, "team/gated")
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: team/gated is gated: accept its terms at http\S+/team/gated; then pass --hf-token"
        r" or set HF_TOKEN \(http\S+/settings/tokens\)\n",
        done.stderr,
    )
    done = tune(hub, tmp_path, "team/gated", "--hf-token", "bad")
    assert "the token's account has no access yet" in done.stderr
    assert not (tmp_path / "models").exists()
    assert tune(hub, tmp_path, "team/gated", "--hf-token", "good").returncode == 0
    words = ("team/gated", "--output-dir", "other")
    assert tune(hub, tmp_path, *words, HF_TOKEN="good").returncode == 0


@pytest.mark.parametrize(
    ("words", "environment", "code", "message"),
    [
        (["team/gone"], {}, 1, "team/gone: the Hub has no such model, or it is private"),
        (["team/model", "--revision", "v9"], {}, 1, "team/model has no revision v9"),
        (["team/broken"], {}, 1, "team/broken: the Hub answers HTTP 500: try later"),
        (["team/model"], {"HF_HUB_OFFLINE": "1"}, 1, "HF_HUB_OFFLINE is set: unset it"),
        (["team/model"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, 1, "9 cannot be reached ("),
        (["model"], {}, 2, "model: name a model as OWNER/NAME"),
        (["../model"], {}, 2, "name a model as OWNER/NAME"),
        (["team/.."], {}, 2, "name a model as OWNER/NAME"),
        (["team/model", "--output-dir", "full"], {}, 1, "full is not empty and was not made by"),
        (["team/model", "--output-dir", "other"], {}, 1, "other holds team/other: name another"),
        (["team/model", "--output-dir", "full/x"], {}, 1, "full/x is a file"),
        (["team/model", "--ignore-patterns", "*"], {}, 1, "team/model has no file that"),
    ],
)
def test_what_stops_a_download_is_one_sentence(
    hub: Hub, tmp_path: Path, words: list[str], environment: dict, code: int, message: str
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.downloaded_from").write_text("team/other\n")
    done = tune(hub, tmp_path, *words, **environment)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert message in done.stderr


def test_other_weights_are_left_out_only_where_there_are_safetensors():
    assert wanted_files(["pytorch_model.bin", "a.gguf"]) == ["pytorch_model.bin"]
    mistral = ["consolidated.safetensors", "model-00001-of-00002.safetensors", "tekken.json"]
    assert wanted_files(mistral) == mistral[1:]
    assert wanted_files(["consolidated.safetensors"]) == ["consolidated.safetensors"]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "..\\x", "C:x"])
def test_no_file_leads_out_of_the_folder(name: str):
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        wanted_files(["config.json", name])
