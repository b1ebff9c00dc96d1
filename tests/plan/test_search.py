"""The search answers with what is fastest of what fits, the given configuration among them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.models.llama import smollm2_135m

CONFIG = "smollm2/135M_full_single_device"
LORA = "smollm2/135M_lora_single_device"
MANY = f"{1 << 20}GiB"


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Return a function that plans a model of four blocks, and returns its JSON object."""
    with torch.device("meta"):
        sizes = smollm2_135m().config
    small = {"num_hidden_layers": 4, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(sizes | small))

    def run(*words: str, config: str = CONFIG) -> dict[str, Any]:
        basics = ["tokenizer.max_seq_len=64", "batch_size=2", "gradient_accumulation_steps=1"]
        given = [config, f"checkpoint_dir={tmp_path}", *basics, *words, "--json"]
        code, captured = main(["plan", *given]), capsys.readouterr()
        found = json.loads(captured.out)
        assert code == (0 if "found" not in found or found["found"]["best"]["fits"] else 1)
        return found | {"told": captured.err}

    return run


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.4f}GiB"


def test_a_large_card_with_little_host_memory_gets_what_spares_the_host(plan) -> None:
    spare = plan("optimizer_state=device", "optimizer_in_bwd=False")["host_total"]
    best = plan("--vram", MANY, "--ram", gib(1.04 * spare))["found"]["best"]
    assert best["fits"]
    assert best["host_total"] <= 1.04 * spare


def test_a_small_card_gets_what_spares_the_card(plan) -> None:
    least = plan(
        "optimizer_in_bwd=True", "resident_layers=0", "optimizer_state=host", "batch_size=1",
        "gradient_accumulation_steps=2",
    )["reserved"]  # fmt: skip
    found = plan("--vram", gib(1.04 * least))["found"]
    assert found["best"]["fits"]
    assert "optimizer_state=host" in found["best"]["overrides"]
    assert found["best"]["reserved"] <= 1.04 * least


def test_what_was_given_is_one_of_those_that_are_compared(plan) -> None:
    given = ["optimizer_in_bwd=True", "clip_grad_norm=null", "resident_layers=3"]
    assert "  fits: as it is" in plan(*given, "--vram", MANY)["told"]


def test_with_all_there_is_nothing_is_saved(plan) -> None:
    best = plan("--vram", MANY, "--ram", MANY)["found"]["best"]
    assert best["fits"]
    assert not {"resident_layers=0", "optimizer_state=host"} & set(best["overrides"])


def test_keys_that_exclude_switches_leave_the_others(plan) -> None:
    given = ["on_nonfinite=skip", "clip_grad_norm=null"]
    assert plan(*given, "--vram", MANY)["found"]["best"]["fits"]


def test_an_optimizer_that_refuses_a_switch_is_searched_without_it(plan) -> None:
    paged = ["optimizer=bitsandbytes.optim.PagedAdamW8bit", "optimizer.lr=1e-5"]
    found = plan(*paged, "--vram", MANY)
    assert found["found"]["best"]["fits"]
    assert "paged optimizer state is the host's" in " ".join(found["assumed"])
    assert found["device"]["optimizer state"] < found["state"] / 10
    assert found["host"]["optimizer state"] > found["state"] / 2


def test_a_coarser_optimizer_that_refuses_the_weights_ends_no_search(plan) -> None:
    found = plan("--vram", "0.4GiB", config=LORA)["found"]
    assert not found["best"]["fits"]


def test_without_a_key_is_the_best_with_that_key_as_given(plan) -> None:
    needs = plan("optimizer_in_bwd=True", "optimizer_state=host", "clip_grad_norm=null")
    found = plan("clip_grad_norm=null", "--vram", gib(1.04 * needs["reserved"]))["found"]
    best = set(found["best"]["overrides"])
    assert found["without"]
    for key, other in found["without"].items():
        assert not other["fits"]
        assert {word for word in best if not word.startswith(f"{key}=")} >= set(other["overrides"])
