"""`tune diff`: a copy against its original, with diff's exit codes."""

from pathlib import Path

import pytest

from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.config import configs

NAME = "smollm2/135M_full_single_device"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["cp", NAME, "mine.yaml"]) == 0
    capsys.readouterr()
    return tmp_path / "mine.yaml"


def test_a_fresh_copy_is_its_original(copy: Path, capsys: pytest.CaptureFixture):
    assert main(["diff", "mine.yaml"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_changed_line_is_shown_and_the_exit_code_is_1(copy: Path, capsys: pytest.CaptureFixture):
    copy.write_text(copy.read_text().replace("\nepochs: 2", "\nepochs: 3"))
    for words in (["diff", "mine.yaml"], ["diff", "mine.yaml", NAME]):
        assert main(words) == 1
        out = capsys.readouterr().out.splitlines()
        assert out[:2] == [f"--- {NAME}", "+++ mine.yaml"]
        assert [line for line in out[2:] if line[0] in "+-"] == ["-epochs: 2", "+epochs: 3"]


def test_a_missing_newline_at_the_end_is_a_difference(copy: Path, capsys: pytest.CaptureFixture):
    copy.write_text(copy.read_text().removesuffix("\n"))
    assert main(["diff", "mine.yaml"]) == 1
    assert capsys.readouterr().out.endswith("\n\\ No newline at end of file\n")


def test_an_original_that_changed_since_the_copy_is_named(
    copy: Path, capsys: pytest.CaptureFixture
):
    stamp, _, rest = copy.read_text().partition("\n")
    copy.write_text(f"{stamp[:-16]}0123456789abcdef\n{rest}")
    assert main(["diff", "mine.yaml"]) == 0
    assert f"{NAME} is no longer what it was" in capsys.readouterr().err


def test_a_file_without_a_stamp_needs_the_name(copy: Path, capsys: pytest.CaptureFixture):
    plain = copy.with_name("plain.yaml")
    plain.write_text(configs()[NAME].read_text())
    assert main(["diff", "plain.yaml"]) == 2
    assert "name the original" in capsys.readouterr().err
    assert main(["diff", "plain.yaml", NAME]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone.yaml"], "gone.yaml: No such file"),
        (["."], ".: Is a directory"),
        (["mine.yaml", "gone"], "no recipe or config has that name"),
        (["bytes.yaml"], "not UTF-8"),
    ],
)
def test_trouble_is_2_as_with_diff(
    copy: Path, words: list[str], message: str, capsys: pytest.CaptureFixture
):
    copy.with_name("bytes.yaml").write_bytes(b"\xff\xfe")
    assert main(["diff", *words]) == 2
    assert message in capsys.readouterr().err
