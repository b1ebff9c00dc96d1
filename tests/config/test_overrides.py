"""Overrides on nodes, references, unknown keys, and the recipe that a config names."""

import inspect
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from solotune.config import (
    Component,
    ConfigError,
    load,
    located,
    read_schema,
    resolved_yaml,
    torchtune,
)
from solotune.config.component import DEFAULT_PATHS
from solotune.config.registry import find_config, find_recipe
from solotune.errors import DataError, UserError


def arguments(loaded, key="optimizer"):
    return loaded.values[key].arguments


def test_replacing_a_component_drops_the_old_arguments(load_yaml):
    loaded = load_yaml("optimizer=torch.optim.SGD")
    assert loaded.values["optimizer"].path == "torch.optim.SGD"
    assert arguments(loaded) == {}


@pytest.mark.parametrize("order", [1, -1])
def test_repeated_arguments_belong_to_the_new_component_in_any_order(load_yaml, order):
    words = ["optimizer=torch.optim.SGD", "optimizer.lr=0.1"][::order]
    assert arguments(load_yaml(*words)) == {"lr": 0.1}


def test_naming_the_same_component_keeps_its_arguments(load_yaml):
    assert arguments(load_yaml("optimizer=torch.optim.AdamW")) == {"lr": 2e-5, "weight_decay": 0.1}


def test_setting_the_path_is_replacing_the_component(load_yaml):
    loaded = load_yaml("optimizer._component_=torch.optim.SGD", "optimizer.lr=1")
    assert loaded.values["optimizer"].path == "torch.optim.SGD"
    assert arguments(loaded) == {"lr": 1}


def test_a_dataset_text_is_a_source_and_keeps_the_nodes_other_arguments(load_yaml):
    loaded = load_yaml("dataset.packed=False", "dataset=other.csv")
    assert loaded.values["dataset"].path == "solotune.data.dataset"
    assert arguments(loaded, "dataset") == {"source": "other.csv", "packed": False}
    node = "dataset:\n  _component_: solotune.data.pydoc_dataset\n  split: all\n"
    loaded = load_yaml("dataset=other.csv", change=("dataset: chats.jsonl\n", node))
    assert arguments(loaded, "dataset") == {"source": "other.csv"}


def test_a_hub_name_is_a_source_and_a_dotted_path_a_component(load_yaml):
    loaded = load_yaml("dataset=HuggingFaceH4/no_robots")
    assert arguments(loaded, "dataset") == {"source": "HuggingFaceH4/no_robots"}
    loaded = load_yaml("dataset=solotune.data.pydoc_dataset")
    assert loaded.values["dataset"].path == "solotune.data.pydoc_dataset"


def test_a_part_of_an_unset_node_makes_the_node_with_its_default_component(load_yaml):
    loaded = load_yaml("dataset_val.source=val.jsonl")
    assert loaded.values["dataset_val"].path == "solotune.data.dataset"


def test_list_items_are_set_by_index(load_yaml):
    more = "names: [a, b]\nextra:\n  sets:\n    - {source: a}\n    - {source: b}\n"
    loaded = load_yaml("names.1=c", "extra.sets.0.source=x", more=more)
    assert loaded.values["names"] == ["a", "c"]
    assert loaded.values["extra"] == {"sets": [{"source": "x"}, {"source": "b"}]}
    with pytest.raises(ConfigError, match=r"names\.2: names is a list of 2 items"):
        load_yaml("names.2=c", more=more)


def test_a_tilde_deletes_a_key_so_that_its_default_counts(load_yaml):
    more = "clip_grad_norm: 3\nnames: [a, b]\n"
    loaded = load_yaml("~clip_grad_norm", "~names.0", "~optimizer.lr", more=more)
    assert loaded.values["clip_grad_norm"] == 1.0
    assert loaded.values["names"] == ["b"]
    assert "lr" not in arguments(loaded)
    with pytest.raises(ConfigError, match=r"no clip_grad_nrm; did you mean clip_grad_norm\?"):
        load_yaml("~clip_grad_nrm", more=more)


def test_a_value_has_no_parts(load_yaml):
    with pytest.raises(ConfigError, match=r"steps\.a: steps is 3, which has no parts"):
        load_yaml("steps.a=1", more="steps: 3\n")


def test_the_last_of_two_overrides_wins(load_yaml):
    assert load_yaml("steps=1", "steps=2").values["steps"] == 2


def test_references_stand_for_other_keys(load_yaml):
    more = "run_name: ${output_dir}/x\nsteps: ${extra.n}\nnames: ['${extra.n}', b]\nextra: {n: 7}\n"
    loaded = load_yaml("extra.n=8", "optimizer.lr=${lr}", "lr=2", more=more)
    assert loaded.values["run_name"] == "out/x"
    assert loaded.values["steps"] == 8
    assert loaded.values["names"] == ["8", "b"]
    assert arguments(loaded)["lr"] == 2


def test_a_reference_to_a_node_copies_it(load_yaml):
    loaded = load_yaml(more="dataset_val: ${dataset}\n")
    assert loaded.values["dataset_val"].path == "solotune.data.dataset"
    assert arguments(loaded, "dataset_val") == {"source": "chats.jsonl"}


@pytest.mark.parametrize(
    "word",
    [
        "${oc.env:HOME}",
        "a${oc.env:HOME}",
        "${a.${oc.env:X}}",
        "${oc.create:1}",
        "${:x}",
        "${x:y}",
        r"\\${oc.env:HOME}",
        r"\${a ${oc.env:HOME}}",
    ],
)
def test_resolvers_are_refused(load_yaml, word):
    with pytest.raises(ConfigError, match=r"run_name: .*resolvers are refused"):
        load_yaml(f"run_name={word}")


def test_an_escaped_reference_is_text(load_yaml):
    word = r"price: \${oc.env:HOME}"
    assert load_yaml(f"run_name={word}").values["run_name"] == "price: ${oc.env:HOME}"


@pytest.mark.parametrize(
    "word", ["${stps}", "${run_name}", "${optimizer.l}", "${", "${names.9}", r"${a\${oc.env:HOME}}"]
)
def test_a_reference_to_nothing_is_one_fault(load_yaml, word):
    with pytest.raises(ConfigError, match=r"^run_name: .* has no value") as error:
        load_yaml(f"run_name={word}", more="steps: 1\nnames: [a]\n")
    assert "\n" not in str(error.value)


def test_all_faults_are_listed_at_once_with_file_line_and_nearest_key(load_yaml, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        load_yaml("stepz=3", "lr=x", more="clip_grad_nrm: 1\nshuffle: 3\nlrr: 1\n")
    file = tmp_path / "tiny.yaml"
    assert str(error.value).splitlines() == [
        "5 faults in the config",
        f"  clip_grad_nrm: unknown key; did you mean clip_grad_norm? ({file}:8)",
        f"  lrr: unknown key; did you mean lr? ({file}:10)",
        "  stepz: unknown key; did you mean steps?",
        "  lr: a number is needed, not x",
        f"  shuffle: True or False is needed, not 3 ({file}:9)",
    ]


def test_a_key_of_a_node_is_found_by_its_last_word(load_yaml):
    with pytest.raises(ConfigError, match=r"weight_decay: unknown key; did you mean optimizer\.we"):
        load_yaml("weight_decay=0.1")


def test_a_required_key_without_a_value_is_named(recipe: Path):
    with pytest.raises(ConfigError) as error:
        load(recipe, None, ["optimizer=torch.optim.SGD"])
    assert str(error.value).splitlines()[1:] == [
        "  dataset: not set: give dataset=...",
        "  output_dir: not set: give output_dir=...",
    ]


@pytest.mark.parametrize(
    ("override", "repair"),
    [
        (
            "checkpointer.checkpoint_dir=x",
            "checkpointer.checkpoint_dir: .*the key is checkpoint_dir",
        ),
        ("num_output_chunks=8", "loss.chunk_tokens"),
        ("loss.num_output_chunks=8", "loss.chunk_tokens"),
        ("fsdp_cpu_offload=True", "one device"),
        ("log_peak_memory_stats=True", "always logged"),
        ("dataset=torchtune.datasets.alpaca_dataset", "source=tatsu-lab/alpaca$"),
        ("lora_rank=8", r"the key is adapter\.rank"),
        ("optimizer=torchtune.models.llama3.llama3_8b", "solotune.models.auto"),
    ],
)
def test_what_is_torchtunes_gets_its_equivalent_named(load_yaml, override, repair):
    with pytest.raises(ConfigError, match=f"torchtune.*{repair}|{repair}"):
        load_yaml(override).check_components()


def test_no_torchtune_key_leads_to_one_that_is_refused():
    names = ("full_finetune_single_device", "lora_finetune_single_device")
    keys = {key for name in names for key in read_schema(find_recipe(name))}
    for name, here in torchtune.KEYS.items():
        if here.name is None:
            continue
        key, _, part = here.name.partition(".")
        assert key in keys, name
        if part:
            target = Component(DEFAULT_PATHS[key], key=key).target
            assert part.partition(".")[0] in inspect.signature(target).parameters, name


def test_no_torchtune_component_leads_to_one_that_is_not_there():
    for here in torchtune.COMPONENTS.values():
        if here.name is not None:
            assert callable(Component(here.name).target)


@pytest.mark.parametrize(
    "word", ["learning_rate=1e-4", "optimizer.learning_rate=1e-4", "optimizer.lrr=1e-4"]
)
def test_the_learning_rate_is_found_under_other_names(load_yaml, word):
    change = ("  lr: 2e-5\n", "")
    with pytest.raises(ConfigError, match=r"(the key is|did you mean) optimizer\.lr"):
        load_yaml(word, change=change).check_components()


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("optimizer=AdamW", "torch.optim.AdamW"),
        ("optimizer=adamw", "torch.optim.AdamW"),
        ("optimizer=AdamW8bit", "torchao.optim.AdamW8bit"),
        ("optimizer=AdamKahan", "solotune.optim.AdamWKahan"),
        ("lr_scheduler=cosine", "solotune.training.cosine"),
        ("loss=CrossEntropy", "solotune.losses.LinearCrossEntropy"),
        ("dataset._component_=pydoc_dataset", "solotune.data.pydoc_dataset"),
    ],
)
def test_a_component_without_its_module_gets_the_full_path_named(load_yaml, word, path):
    with pytest.raises(ConfigError) as error:
        load_yaml(word)
    assert str(error.value).partition(" (")[0].endswith(f"did you mean {path}?")


def test_a_config_for_another_recipe_is_refused_with_the_repair(load_yaml, recipe: Path):
    change = ("recipe: tiny.py", "recipe: generate")
    with pytest.raises(
        ConfigError, match=r"recipe: the config is for generate, .*tune run generate"
    ):
        load_yaml(change=change)
    stamp = "# solotune 0.1.0 generate sha256:0123456789abcdef\n"
    recipe.write_text(stamp + recipe.read_text())
    load_yaml(change=change)  # a copy runs with the configs of its original


def test_the_resolved_config_runs_again_with_the_same_values(load_yaml, recipe: Path):
    words = ["run_name='on'", "optimizer.betas=[0.9, 0.5]", "names=['1', ' a: b ', '']", "lr=1e-7"]
    loaded = load_yaml(*words, more="dataset_val: {source: '007', column_map: {'a b': x=y}}\n")
    names: dict = {"__name__": "copied"}
    exec(recipe.read_text(), names)
    text = resolved_yaml(loaded.instance(names["Config"]))
    assert text.startswith(f"recipe: {recipe}\n")
    again = recipe.with_name("again.yaml")
    again.write_text(text)
    found = load(recipe, again).values
    assert {k: getattr(v, "arguments", v) for k, v in found.items()} == {
        k: getattr(v, "arguments", v) for k, v in loaded.values.items()
    }
    assert found["dataset_val"].arguments["source"] == "007"


def test_the_command_of_a_config_gives_the_same_config_again(load_yaml, recipe: Path):
    words = ("output_dir=a b", "names=[it's, $HOME]", "~dataset", "dataset=${output_dir}.csv")
    words += ("optimizer=collections.OrderedDict",)
    loaded = load_yaml(*words, trust=("collections", "functools"))
    config = recipe.with_name("tiny.yaml")
    line = loaded.origin.command(["steps=3"])
    given = ("--config", str(config), "--trust", "collections", "--trust", "functools")
    assert shlex.split(line) == ["tune", "run", str(recipe), *given, *words, "steps=3"]
    line = loaded.origin.command(["output_dir=y", "dataset=z"])
    assert shlex.split(line)[-4:] == [words[1], words[4], "output_dir=y", "dataset=z"]
    assert (
        load(
            recipe, None, ["output_dir=x", "dataset=y", "optimizer=torch.optim.SGD"]
        ).origin.command()
        == f"tune run {recipe} output_dir=x dataset=y optimizer=torch.optim.SGD"
    )


def test_a_fault_gets_the_line_of_its_key_where_a_file_sets_it(load_yaml, recipe: Path):
    loaded = load_yaml("steps=3", more="steps: 0\nextra: {a: [1]}\n")
    names: dict = {"__name__": "copied"}
    exec(recipe.read_text(), names)
    cfg, file = loaded.instance(names["Config"]), recipe.with_name("tiny.yaml")

    def message(fault: UserError) -> str:
        with pytest.raises(type(fault)) as error, located(cfg):
            raise fault
        return str(error.value)

    assert message(ConfigError("output_dir=out: is bad")) == f"output_dir=out: is bad ({file}:7)"
    assert message(DataError("dataset.source=x: gone")) == f"dataset.source=x: gone ({file}:6)"
    assert message(ConfigError("extra.a.0=1: is bad")) == f"extra.a.0=1: is bad ({file}:9)"
    once = f"output_dir: is bad ({file}:7)"
    assert message(ConfigError(once)) == once
    for text in ("steps=3: by override", "lr=1: a default", "out: a file", "something else"):
        assert message(ConfigError(text)) == text


def test_the_schema_is_read_without_importing_the_recipe(recipe: Path):
    recipe.write_text("import nowhere_to_be_found\n" + recipe.read_text())
    schema = read_schema(recipe)
    assert list(schema)[:3] == ["optimizer", "dataset", "dataset_val"]
    assert schema["lr"].default == 1e-3
    assert schema["lr"].comment == "of the optimizer"
    assert schema["clip_grad_norm"].annotation == float | None


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("x: int = len('a')", "must be a literal"),
        ("x: __import__('os').system('id') = 1", "is made of"),
        ("x: Path = 1", "is made of"),
        ("x: int = 1 +", "not Python"),
    ],
)
def test_a_field_that_source_alone_does_not_tell_is_refused(recipe: Path, field, message):
    recipe.write_text(f"class Config:\n    {field}\n")
    with pytest.raises(ConfigError, match=message) as error:
        read_schema(recipe)
    assert "tiny.py:2" in str(error.value)


def test_a_file_without_config_is_no_recipe(recipe: Path):
    recipe.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="dataclass named Config"):
        read_schema(recipe)


@pytest.mark.parametrize("name", ["nope", "nope.py", "no/where.py", "."])
def test_a_missing_recipe_or_config_is_named(name):
    with pytest.raises(ConfigError, match="recipe "):
        find_recipe(name)
    with pytest.raises(ConfigError, match="config "):
        find_config(name)


def test_the_config_stage_imports_no_torch(recipe: Path, tmp_path: Path):
    script = (
        "import sys; from pathlib import Path; from solotune.config import load;"
        f"load(Path({str(recipe)!r}), None, ['output_dir=x', 'dataset=y.jsonl',"
        "'optimizer=torch.optim.SGD']);"
        "sys.exit('torch' in sys.modules or 'omegaconf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path).returncode == 0
