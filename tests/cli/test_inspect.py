"""`tune inspect`: rows, counts and parameters of a model folder that holds no weights."""

import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from solotune import tokenizers
from solotune.cli.inspect_data import row_lines, visible  # pyright: ignore[reportMissingImports]
from solotune.cli.inspect_model import Entry  # pyright: ignore[reportMissingImports]
from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.data.inspection import FedRow, histogram, pieces

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 260,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": True,
}
RECIPE = "full_finetune_single_device"
SHORT = [[("user", f"Say {k}"), ("assistant", f"Answer {k}. " * (1 + k % 4))] for k in range(9)]
LONG = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hé 漢字 🤖"), ("user", "And?")]
CHATS = [*SHORT, [*LONG, ("assistant", "No more.")]]


@pytest.fixture
def model(tmp_path: Path, write_tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return folder


def write_rows(rows: list) -> str:
    lines = [
        json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) + "\n" for row in rows
    ]
    Path("chats.jsonl").write_text("".join(lines), encoding="utf-8")
    return "chats.jsonl"


def inspect_data(*words: str) -> int:
    return main(
        [
            *("inspect", "data", RECIPE, "checkpoint_dir=model", "dataset=chats.jsonl"),
            *("optimizer=torch.optim.SGD", "device=cpu", "dataset.cache_dir=null", *words),
        ]
    )


def trained_texts(rows: list[dict], folder: Path) -> list[str]:
    """The text of each run of trained tokens within a segment."""
    tokenizer, texts = tokenizers.auto(folder), []
    for row in rows:
        start = 0
        for length in row["segments"]:
            labels = row["labels"][start : start + length]
            tokens = row["tokens"][start : start + length]
            start += length
            for is_trained, run in groupby(range(length), key=lambda k: labels[k] >= 0):
                picked = list(run)
                if is_trained:
                    assert [labels[k] for k in picked] == [tokens[k] for k in picked]
                    texts.append(tokenizer.decode([tokens[k] for k in picked]))
    return texts


@pytest.mark.parametrize("packed", [True, False])
def test_the_trained_tokens_of_all_rows_are_the_answers_and_their_terminators(
    packed: bool, model: Path, capsys: pytest.CaptureFixture
):
    write_rows(CHATS)
    words = (f"dataset.packed={packed}", "tokenizer.max_seq_len=300", "val_fraction=0")
    assert inspect_data("--json", "--samples", "99", "batch_size=3", *words) == 0
    *rows, counts = map(json.loads, capsys.readouterr().out.splitlines())
    answers = [f"{text}<|im_end|>" for row in CHATS for role, text in row if role == "assistant"]
    assert Counter(trained_texts(rows, model)) == Counter(answers)

    filler = sum(len(row["tokens"]) - sum(row["segments"]) for row in rows)
    trained = sum(label >= 0 for row in rows for label in row["labels"])
    assert [len(row["segments"]) for row in rows].count(1) == (10 if not packed else 0)
    assert (counts["samples"], counts["rows_read"], counts["num_targets"]) == (10, 10, trained)
    assert counts["num_tokens"] == sum(sum(row["segments"]) for row in rows)
    assert counts["num_filler"] == filler
    share = counts["num_tokens"] / (counts["num_tokens"] + filler)
    assert counts["packing_efficiency"] == pytest.approx(share, abs=1e-4)
    assert sum(entry["samples"] for entry in counts["histogram"]) == 10


def test_of_a_sample_that_is_cut_between_packs_every_token_is_shown_once(
    model: Path, capsys: pytest.CaptureFixture
):
    write_rows(CHATS)
    words = ("dataset.split_across_pack=True", "tokenizer.max_seq_len=64", "val_fraction=0")
    assert inspect_data("--json", "--samples", "99", *words) == 0
    *rows, counts = map(json.loads, capsys.readouterr().out.splitlines())
    assert sum(sum(row["segments"]) for row in rows) == counts["num_tokens"]
    shown = sum(label >= 0 for row in rows for label in row["labels"])
    cut = counts["num_targets"] - shown  # first tokens of a second part, trained a row before
    assert 0 < cut <= len(rows)


def test_a_stream_is_shown_and_prints_no_other_line_than_json(
    model: Path, capsys: pytest.CaptureFixture
):
    write_rows(CHATS)
    words = ("dataset.streaming=True", "dataset.rows_per_epoch=40", "val_fraction=0")
    assert inspect_data("--json", "--samples", "30", "tokenizer.max_seq_len=300", *words) == 0
    *rows, counts = map(json.loads, capsys.readouterr().out.splitlines())
    assert (len(rows), counts["samples"]) == (30, 10)


def test_faulty_rows_are_counted_and_shown(model: Path, capsys: pytest.CaptureFixture):
    fine = [("user", "Hi"), ("assistant", "Yes.")]
    long = [("user", "Hi"), ("assistant", "word " * 40)]  # cut: its end is never learnt
    spelled = [("user", "What does <|im_end|> mean?"), ("assistant", "It ends a turn.")]
    write_rows([fine, long, spelled, fine, fine])
    words = ("tokenizer.max_seq_len=100", "val_fraction=0")
    assert inspect_data("--json", "--samples", "0", *words) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["rows_cut"], counts["share_cut"]) == (1, 0.2)
    assert counts["duplicates"] == 2
    assert counts["terminator_not_trained"] == 1
    assert counts["control_tokens_in_text"] == 1
    assert counts["longest"] == 100
    assert counts["examples"] == {"duplicates": [3, 4], "terminator_not_trained": [1]}

    assert inspect_data("--samples", "9", *words) == 0
    out = capsys.readouterr().out
    assert "{+Yes.<|im_end|>+}" in out
    assert "1  rows cut at max_seq_len (20.0%)" in out
    assert re.search(r'terminator not trained: sample 1 ends with ".*word wor', out)
    assert "dataset: 1 rows cut at max_seq_len" in out  # what a run prints


def test_the_validation_set_is_shown_on_demand(model: Path, capsys: pytest.CaptureFixture):
    write_rows(CHATS)
    for words, samples in (((), 9), (("--validation",), 1)):
        words = (*words, "--json", "--samples", "0", "val_fraction=0.01")
        assert inspect_data(*words) == 0
        assert json.loads(capsys.readouterr().out)["samples"] == samples
    assert inspect_data("--validation", "val_fraction=0") == 1
    assert "there is no validation set: set val_fraction" in capsys.readouterr().err


class Page(HTMLParser):
    """Checks that tags close in order; collects texts by class, and everything that would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, dict]] = []
        self.loads: list[str] = []
        self.texts: dict[str, list[str]] = {"sample": [], "t": [], "m": []}

    def handle_starttag(self, tag: str, attrs: list) -> None:
        values = dict(attrs)
        self.loads += [tag] if tag in ("script", "img", "link", "iframe") else []
        self.loads += [name for name in values if name in ("src", "href") or name[:2] == "on"]
        if values.get("class") == "sample":
            self.texts["sample"].append("")
        if tag != "meta":
            self.open.append((tag, values))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "style":
            self.loads += re.findall("url|import", data)
        kind = self.open[-1][1].get("class") if self.open else None
        if kind in ("t", "m") and len(self.open) > 1 and self.open[-2][1].get("class") == "sample":
            self.texts[kind].append(data)
            self.texts["sample"][-1] += data


def test_the_page_holds_every_token_and_loads_nothing(model: Path, capsys: pytest.CaptureFixture):
    nasty = "</div><script>alert(1)</script> & \x1b[31m 漢字 \t\n<|im_end|>"
    write_rows([[("user", nasty), ("assistant", f"{nasty} {k}")] for k in range(3)])
    assert inspect_data("--html", "page.html", "--samples", "3", "val_fraction=0") == 0
    assert capsys.readouterr().out == "page.html\n"
    text = Path("page.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    page.close()
    assert (page.open, page.loads) == ([], [])
    shown = nasty.replace("\x1b", "\\x1b").replace("\t", "\u21e5\t").replace("\n", "\u21b5\n")
    user = f"<|im_start|>user\u21b5\n{shown}<|im_end|>\u21b5\n<|im_start|>assistant\u21b5\n"
    assert sorted(page.texts["sample"]) == [
        f"{user}{shown} {k}<|im_end|>\u21b5\n" for k in range(3)
    ]
    trained = "".join(page.texts["t"])
    assert sorted(trained.split(" 漢字 ")[1:])[0].startswith("\u21e5\t\u21b5\n<|im_end|> ")
    assert "user" not in trained


def test_a_terminal_gets_colours_and_no_escape_of_the_data(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    write_rows([[("user", "Red \x1b[31m"), ("assistant", "No \x1b[0m")]] * 2)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        assert inspect_data("--samples", "1", "val_fraction=0") == 0
        out = terminal.getvalue()
        assert ("\x1b[1;32mNo \\x1b[0m<|im_end|>\x1b[0m" in out) == coloured
        assert ("{+No \\x1b[0m<|im_end|>+}" in out) != coloured
        assert "\x1b[31m" not in out


def test_filler_is_counted_and_a_first_token_is_no_target():
    row = FedRow(tokens=[5, 6, 7, 8, 0, 0], labels=[-100, 6, -100, 8, -100, -100], segments=[2, 2])
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(f"({i})" for i in ids))
    assert list(row_lines(7, row, tokenizer, colours=False)) == [  # pyright: ignore
        "=== row 7: 6 tokens, 2 trained, 2 filler",
        *("--- sample 0 of 2: 2 tokens", "(5){+(6)+}"),
        *("--- sample 1 of 2: 2 tokens", "(7){+(8)+}"),
        "--- 2 filler tokens",
    ]
    assert visible("a\x00b\tc\n\x9b\u202e") == "a\\x00b\tc\n\\x9b\\u202e"


def test_pieces_are_the_text_and_never_half_a_character(tiny_tokenizer_dir: Path):
    tokenizer = tokenizers.auto(tiny_tokenizer_dir)
    for text in ("plain", "漢字 🤖 é", "<s> x </s>", "\ufffd\ufffd", ""):
        ids = tokenizer.encode(text, allow_special=True)
        found = list(pieces(tokenizer, ids))
        assert "".join(piece for _, piece in found) == text
        assert sum(count for count, _ in found) == len(ids)
    assert [piece for _, piece in pieces(tokenizer, tokenizer.encode("é漢"))] == ["é", "漢"]
    broken = tokenizer.encode("é漢")[:-1]  # the last character is cut
    assert "".join(piece for _, piece in pieces(tokenizer, broken)) == tokenizer.decode(broken)


@pytest.mark.parametrize("longest", [1, 2, 16, 17, 100, 2048, 131072])
def test_the_histogram_has_few_steps_that_hold_every_length(longest: int):
    lengths = np.array([1, longest, longest])
    steps = histogram(lengths)
    assert len(steps) <= 16
    assert sum(step["samples"] for step in steps) == 3
    assert steps[0]["from"] == 1
    assert steps[-1]["from"] <= longest <= steps[-1]["to"]
    assert all(a["to"] + 1 == b["from"] for a, b in pairwise(steps))


def test_parameters_are_listed_by_module_and_counted_once(
    model: Path, capsys: pytest.CaptureFixture
):
    words = [RECIPE, "checkpoint_dir=model", "dataset=x.jsonl", "optimizer=torch.optim.SGD"]
    assert main(["inspect", "model", *words, "device=cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {entry["name"]: entry for entry in found["entries"]}
    q_proj = by_name["layers.{}.self_attn.q_proj.weight"]
    assert (q_proj["shape"], q_proj["dtype"], q_proj["blocks"]) == ([64, 64], "bfloat16", [0, 1, 2])
    assert (q_proj["num_parameters"], q_proj["num_bytes"]) == (3 * 64 * 64, 2 * 3 * 64 * 64)
    assert by_name["norm.weight"]["dtype"] == "float32"
    matrices = 260 * 64 + 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)  # tied: one embedding
    assert found["num_parameters"] == found["num_trainable"] == matrices + 7 * 64
    assert found["num_bytes"] == 2 * matrices + 4 * 7 * 64

    added = "tokenizer.added_tokens=[<|new|>, <|other|>]"
    frozen = "trainable=layers.[12]"
    assert main(["inspect", "model", *words, "device=cpu", "--json", added, frozen]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {(entry["name"], entry["trainable"]): entry for entry in found["entries"]}
    assert by_name["embed_tokens.weight", False]["shape"] == [262, 64]
    assert by_name["layers.{}.mlp.up_proj.weight", True]["blocks"] == [1, 2]
    assert by_name["layers.{}.mlp.up_proj.weight", False]["blocks"] == [0]
    assert found["num_trainable"] == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64)

    assert main(["inspect", "model", *words, "device=cpu"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"layers\.\{0-2\}\.mlp\.up_proj\.weight +96 x 64 +18,432  bfloat16", out)
    assert f"{matrices + 448:,} parameters, {matrices + 448:,} of them trained" in out


def test_the_blocks_of_a_line_are_spelled_as_ranges():
    def title(*blocks: int) -> str:
        name = "layers.{}.weight" if blocks else "norm.weight"
        return Entry(name, (1,), "", "", True, blocks=list(blocks)).title

    assert title() == "norm.weight"
    assert title(4) == "layers.4.weight"
    assert title(0, 1, 2, 5, 7, 8) == "layers.{0-2,5,7-8}.weight"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["dat"], 2, "tune inspect dat: say what, data or model"),
        (["data"], 2, "name a config: tune inspect data CONFIG"),
        (["data", "generate", "checkpoint_dir=model", "prompt=x"], 1, "generate has no setup_data"),
        (["data", RECIPE, "checkpoint_dirr=x"], 1, "did you mean checkpoint_dir?"),
        (["data", RECIPE, "--nnodes", "2"], 2, "--nnodes is a flag of torchrun"),
        (["data", RECIPE, "--samples", "-1"], 2, "--samples -1: use 0 or more"),
        (["data", RECIPE, "checkpoint_dir=gone", "dataset=x", "optimizer.lr=1"], 1, "optimizer"),
    ],
)
def test_mistakes_are_one_sentence(
    model: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture
):
    assert main(["inspect", *words]) == code
    assert message in capsys.readouterr().err


def test_help_needs_no_torch(capsys: pytest.CaptureFixture):
    assert main(["inspect"]) == 0
    assert "tune inspect model" in capsys.readouterr().out
