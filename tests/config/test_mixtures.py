"""A list of data sets in a config is their mixture."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from solotune import tokenizers
from solotune.config import Component, ConfigError, Loaded, load, resolved_yaml
from solotune.data import SampleSet

ListYaml = Callable[..., Loaded]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for name, size in (("a", 30), ("b", 10)):
        rows = [{"prompt": f"{name} {k}?", "completion": "Yes."} for k in range(size)]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def built(component: Component, tokenizer_dir: Path) -> SampleSet:
    assert component.check() == []
    return component.build(tokenizers.auto(tokenizer_dir))


@pytest.mark.parametrize(
    "form",
    [
        "dataset:\n- {a}\n- {b}\n",
        "dataset:\n- source: {a}\n- _component_: solotune.data.dataset\n  source: {b}\n",
        "dataset:\n  _component_: solotune.data.mixed\n  datasets:\n  - {a}\n  - source: {b}\n",
    ],
)
def test_a_list_is_a_mixture_of_files_arguments_and_components(
    load_yaml, files: list[Path], tiny_tokenizer_dir: Path, form: str
) -> None:
    text = form.format(a=files[0], b=files[1])
    loaded = load_yaml(change=("dataset: chats.jsonl\n", text))
    samples = built(loaded.values["dataset"], tiny_tokenizer_dir)
    assert len(samples) == 40
    assert samples.lines()[-1].startswith(
        "dataset: an epoch is 40 samples: 30 of dataset 0 (75.0 %)"
    )


def test_items_are_changed_by_their_number_and_lists_are_given_on_the_command_line(
    load_yaml, files: list[Path], tiny_tokenizer_dir: Path
) -> None:
    text = "dataset:\n- source: nowhere.jsonl\n- source: {1}\n".format(*files)
    change = ("dataset: chats.jsonl\n", text)
    loaded = load_yaml(f"dataset.0.source={files[0]}", "dataset.0.max_rows=5", change=change)
    assert len(built(loaded.values["dataset"], tiny_tokenizer_dir)) == 15
    loaded = load_yaml(f"dataset=[{files[0]}, {files[1]}]")
    assert len(built(loaded.values["dataset"], tiny_tokenizer_dir)) == 40
    mixture = "dataset={_component_: solotune.data.mixed, weights: [1, 1], datasets: [%s, %s]}"
    loaded = load_yaml(mixture % tuple(files))
    samples = built(loaded.values["dataset"], tiny_tokenizer_dir)
    assert "20 samples: 10 of dataset 0 (50.0 %)" in samples.lines()[-1]


def test_faults_of_an_item_are_found_before_anything_is_read(load_yaml) -> None:
    text = "dataset:\n- source: a.jsonl\n  packd: True\n- _component_: torch.optim.AdamW\n"
    with pytest.raises(ConfigError, match=r"dataset\.datasets\.1.*is no data set"):
        load_yaml(change=("dataset: chats.jsonl\n", text))
    text = "dataset:\n- source: a.jsonl\n  packd: True\n- train_on: last\n"
    loaded = load_yaml(change=("dataset: chats.jsonl\n", text))
    faults = loaded.values["dataset"].check()
    assert any("packd" in fault and "did you mean" in fault for fault in faults)
    assert any("dataset.datasets.1.source" in fault and "needs it" in fault for fault in faults)


def test_a_written_config_mixes_again(
    load_yaml, recipe: Path, files: list[Path], tiny_tokenizer_dir: Path
) -> None:
    text = "dataset:\n- {}\n- {}\n".format(*files)
    loaded = load_yaml(change=("dataset: chats.jsonl\n", text))
    namespace: dict = {"__name__": "tiny"}
    exec(compile(recipe.read_text(), str(recipe), "exec"), namespace)
    written = recipe.with_name("again.yaml")
    written.write_text(resolved_yaml(loaded.instance(namespace["Config"])))
    again = load(recipe, written)
    assert len(built(again.values["dataset"], tiny_tokenizer_dir)) == 40
