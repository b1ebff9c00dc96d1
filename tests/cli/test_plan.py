"""`tune plan`: answers without weights, data or a card; one clear sentence where it cannot."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.config import ConfigError
from solotune.models.llama import smollm2_135m
from solotune.plan.budget import parse_size
from solotune.plan.device_profile import find_profile, shipped_profiles

RECIPE, CONFIG = "full_finetune_single_device", "smollm2/135M_full_single_device"
SMALL = ["tokenizer.max_seq_len=64", "batch_size=1", "gradient_accumulation_steps=2"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_config_is_planned_before_its_model_is_downloaded(elsewhere: Path, capsys) -> None:
    assert main(["plan", CONFIG, *SMALL, "--device-profile", "4090"]) == 0
    out = capsys.readouterr().out
    assert "assumed: the sizes of smollm2_135m, which the config names" in out
    assert "135 M parameters" in out
    assert "tokens/s" in out
    assert not list(elsewhere.iterdir())


def test_the_words_of_tune_run_are_understood_and_json_adds_up(elsewhere: Path, capsys) -> None:
    assert main(["plan", RECIPE, "--config", CONFIG, *SMALL, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["peak"] == sum(plan["device"].values()) < plan["reserved"]
    assert plan["host_total"] == plan["pinned"] + plan["pageable"]
    assert plan["tokens"] == 2 * 64


def test_a_search_finds_what_fits_writes_it_and_the_file_fits(elsewhere: Path, capsys) -> None:
    words = [CONFIG, *SMALL, "--vram", "1.2GiB", "--ram", "16GiB"]
    assert main(["plan", *words, "--write", "found.yaml", "--plot", "plan.png"]) == 0
    captured = capsys.readouterr()
    assert "that fits" in captured.out
    assert "without it" in captured.out
    assert (elsewhere / "plan.png").stat().st_size > 10_000
    written = yaml.safe_load((elsewhere / "found.yaml").read_text())
    assert written["recipe"] == RECIPE
    assert main(["plan", "found.yaml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["reserved"] <= 1.2 * 2**30


def test_where_nothing_fits_the_closest_is_named_with_what_is_missing(elsewhere, capsys) -> None:
    assert main(["plan", CONFIG, *SMALL, "--vram", "0.3GiB", "--write", "found.yaml"]) == 1
    captured = capsys.readouterr()
    assert "fits with 3% to spare; the closest:" in captured.out
    assert "too much" in captured.out
    assert captured.err.splitlines()[-1].endswith("nothing fits, so nothing was written")
    assert not (elsewhere / "found.yaml").exists()


def test_an_adapter_is_the_last_offer(elsewhere: Path, capsys) -> None:
    words = ["smollm2/360M_full_single_device", *SMALL, "--vram", "0.4GiB"]
    assert main(["plan", *words]) == 1
    *_, offer, command = capsys.readouterr().out.splitlines()
    assert offer.startswith("an adapter: ")
    found = "tune run lora_finetune_single_device --config smollm2/360M_qlora_single_device"
    assert command.strip() == (
        f"{found} checkpoint_dir=models/SmolLM2-360M-Instruct tokenizer.max_seq_len=64"
    )


def test_the_offer_is_for_the_model_that_was_asked_for(elsewhere: Path, capsys) -> None:
    words = [CONFIG, "model=solotune.models.smollm2_360m", *SMALL, "--vram", "0.4GiB"]
    assert main(["plan", *words]) == 1
    assert "model=solotune.models.smollm2_360m" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([CONFIG, "batch_sise=2"], "batch_sise: unknown key; did you mean batch_size?"),
        ([CONFIG, "optimizer_state=dusk"], "optimizer_state: device, host or disk is needed"),
        ([CONFIG, "--device-profile", "409"], "did you mean 4090?"),
        ([CONFIG, "--device-profile", "measured"], "measure it first: tune plan --measure"),
        ([CONFIG, "--vram", "much"], "--vram=much: use a size as 12GiB, 12GB or 12"),
        ([CONFIG, "--write", "x.yaml"], "--write: say what there is"),
        (["generate", "prompt=x", "checkpoint_dir=x"], "generate cannot be planned"),
        (
            [RECIPE, "checkpoint_dir=nowhere", "dataset=x.jsonl", "optimizer=torch.optim.SGD"],
            "checkpoint_dir=nowhere does not exist, and nothing else tells the model's sizes",
        ),
        ([CONFIG, "ac_mode=selective"], "ac_mode=selective with ac_option=None"),
        ([CONFIG, "device=cpo"], "device=cpo: use auto, cuda, cpu, mps or xpu"),
        ([CONFIG, "device=cpu", "--vram", "12"], "a CPU has one memory: name it with --ram"),
        ([CONFIG, "--plot", "x.nonsense"], "--plot x.nonsense: end it in .png, .pdf, .svg"),
        ([CONFIG, "--plot", "no/x.png"], "--plot no/x.png: there is no folder no: make it first"),
        (
            [CONFIG, "--vram", "12", "--write", "no/x.yaml"],
            "--write no/x.yaml: there is no folder no: make it first",
        ),
        ([CONFIG, "device=cpu", "--device-profile", "4090"], "device=cpu is not what"),
    ],
)  # fmt: skip
def test_a_fault_is_one_sentence(words, message, elsewhere: Path, capsys) -> None:
    assert main(["plan", *words]) in (1, 2)
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "config.json is not valid JSON"),
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 7}, "7"),
        ({"num_hidden_layers": "thirty"}, "thirty"),
    ],
)
def test_a_damaged_config_json_is_one_sentence(change, message, elsewhere: Path, capsys) -> None:
    with torch.device("meta"):
        sizes = smollm2_135m().config
    folder = elsewhere / "model"
    folder.mkdir()
    text = "{" if change is None else json.dumps(sizes | change)
    (folder / "config.json").write_text(text)
    assert main(["plan", CONFIG, *SMALL, f"checkpoint_dir={folder}"]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert message in error


def test_a_profile_tells_the_memory_of_its_card(elsewhere: Path, capsys) -> None:
    assert main(["plan", CONFIG, *SMALL, "--device-profile", "4090"]) == 0
    assert "of 23.6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12GiB", 12 * 2**30), ("12", 12 * 2**30), ("12GB", 12 * 10**9), ("500 MiB", 500 * 2**20)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text, flag="--vram") == expected


def test_each_profile_is_whole_and_names_its_source() -> None:
    assert {"4090", "h100"} <= shipped_profiles().keys()
    for name, path in shipped_profiles().items():
        assert find_profile(name).memory_gb_per_s > 100
        assert "Source: " in path.read_text()


def test_a_profile_with_a_misspelt_or_a_missing_field_is_refused(tmp_path: Path) -> None:
    text = shipped_profiles()["4090"].read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("bf16_tflops", "bf16_tflop"))
    with pytest.raises(ConfigError, match="lacks bf16_tflops and holds bf16_tflop"):
        find_profile(str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text(text.replace("165.2", "fast"))
    with pytest.raises(ConfigError, match="bf16_tflops='fast': use a number above 0"):
        find_profile(str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("name: [\n")
    with pytest.raises(ConfigError, match=r"cannot be read: [^\n]*, line 2$"):
        find_profile(str(tmp_path / "mine.yaml"))


def test_this_machine_is_measured_and_its_profile_read(elsewhere: Path, capsys) -> None:
    assert main(["plan", "--measure"]) == 0
    assert "device_profile.yaml" in capsys.readouterr().out
    profile = find_profile("measured")
    assert profile.measured
    assert 0 < profile.bf16_tflops < 2000
