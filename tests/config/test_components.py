"""What a config may name, and the arguments it may give."""

import sys
from pathlib import Path

import pytest

from solotune.config import Component, ConfigError, load
from solotune.config.component import DEFAULT_PATHS, Permissions, path_fault


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "builtins.eval",
        "pickle.loads",
        "subprocess.run",
        "torch.load",
        "torch.hub.load",
        "solotune.cli.main.main",
        "solotune.recipes.full_finetune_single_device.main",
        "solotune.config.component.importlib.import_module",
        "solotune.checkpoint.gguf.convert",
        "torch.optimizers.X",
        "eval",
        "torch.optim.Adam W",
        "torch.optim.().__class__",
        "",
    ],
)
def test_a_path_outside_the_allowed_libraries_is_refused_by_its_text(path):
    before = set(sys.modules)
    assert path_fault(path, Permissions()) is not None
    with pytest.raises(ConfigError):
        _ = Component(path, key="optimizer").target
    assert set(sys.modules) == before, "refused before anything is imported"


@pytest.mark.parametrize(
    "path",
    [
        "solotune.data.os.system",  # through a module that the package imports
        "torch.optim.adamw.cast",  # imported from typing
        "torch.optim.adamw.Tensor",  # a class, but not of torch.optim
        "torch.optim.optimizer.functools.partial",
        "torch.optim.lr_scheduler.partial",
        "torch.optim.lr_scheduler.warnings.warn",
        "torch.optim.optimizer._use_grad_for_differentiable",
        "torch.optim.Optimizer.load_state_dict",  # a method
        "torch.optim.adamw.__builtins__",
        "torch.optim.__doc__",
        "torch.optim.adamw",  # a module
    ],
)
def test_an_alias_is_judged_by_where_the_object_is_defined(path):
    component = Component(path, key="optimizer")
    with pytest.raises(ConfigError, match="optimizer: "):
        _ = component.target
    assert component.check() != []


def test_an_alias_of_pickle_beside_a_copied_recipe_is_refused(recipe: Path):
    (recipe.parent / "beside_alias.py").write_text("from pickle import loads\nimport os\n")
    permissions = Permissions(recipe_folder=recipe.parent)
    for name in ("loads", "os"):
        with pytest.raises(ConfigError):
            _ = Component(f"beside_alias.{name}", permissions=permissions).target


def test_a_module_beside_a_copied_recipe_may_be_named(recipe: Path):
    (recipe.parent / "beside_mine.py").write_text("def rows(tokenizer, *, n: int):\n    return n\n")
    words = ["dataset=beside_mine.rows", "dataset.n=3", "output_dir=x", "optimizer=torch.optim.SGD"]
    dataset = load(recipe, None, words).values["dataset"]
    assert dataset.check() == []
    assert dataset.build("the tokenizer") == 3


def test_a_file_name_is_not_taken_for_a_module(load_yaml):
    assert load_yaml("dataset=beside.jsonl").values["dataset"].arguments["source"] == "beside.jsonl"


def test_trust_allows_a_name_and_what_is_below_it(load_yaml):
    with pytest.raises(ConfigError, match=r"--trust collections\.OrderedDict"):
        load_yaml("optimizer=collections.OrderedDict")
    loaded = load_yaml("optimizer=collections.OrderedDict", trust=("collections",))
    assert loaded.values["optimizer"].build() == {}
    with pytest.raises(ConfigError, match="--trust"):
        load_yaml("optimizer=collections.OrderedDict", trust=("collect",))


def test_the_allowed_libraries_are_reached():
    for path in (
        "torch.optim.AdamW",
        "torch.optim.SGD",
        "torch.optim.Adafactor",
        "torchao.optim.AdamW8bit",
        "bitsandbytes.optim.PagedAdamW8bit",
    ):
        assert isinstance(Component(path).target, type), path


def test_a_misspelt_class_names_the_nearest():
    with pytest.raises(ConfigError, match=r"has no AdamV; did you mean torch\.optim\.Adam"):
        _ = Component("torch.optim.AdamV", key="optimizer").target


def test_faults_of_arguments_are_all_named_with_their_lines(load_yaml, tmp_path: Path):
    loaded = load_yaml(
        "optimizer.betas=[1, 2, 3]",
        "optimizer.params=3",
        change=("  lr: 2e-5\n", "  lr: abc\n  weight_decy: 0.1\n"),
    )
    file = tmp_path / "tiny.yaml"
    assert loaded.values["optimizer"].check() == [
        f"optimizer.lr: a number is needed, not abc ({file}:4)",
        "optimizer.weight_decy: torch.optim.AdamW takes no weight_decy;"
        f" did you mean optimizer.weight_decay? ({file}:5)",
        "optimizer.betas: a list of 2 (each: a number) is needed, not a list of 3",
        "optimizer.params: the recipe gives it: remove it",
    ]


NESTED = """
def outer(*, inner, things: list = (), label: str = ""):
    return inner, things, label

def inner(size: int = 1, *, name: str):
    return size, name
"""


@pytest.fixture
def nested(recipe: Path):
    (recipe.parent / "beside_nested.py").write_text(NESTED)

    def load_nested(*words: str) -> Component:
        words = ("output_dir=x", "optimizer=beside_nested.outer", "dataset=a.csv", *words)
        return load(recipe, None, words).values["optimizer"]

    return load_nested


@pytest.mark.parametrize("module", ["colorsys", "time"])
def test_a_module_that_python_has_by_that_name_is_not_taken_for_the_one_beside(
    recipe: Path, module: str
) -> None:
    (recipe.parent / f"{module}.py").write_text("def zero(total_steps):\n    return 0\n")
    words = ("output_dir=x", "dataset=a.csv", f"optimizer={module}.zero")
    with pytest.raises(ConfigError, match="not the one beside the recipe: give yours another name"):
        _ = load(recipe, None, words).values["optimizer"].target


def test_a_loss_that_does_not_take_what_the_model_needs_is_refused(recipe: Path):
    (recipe.parent / "beside_loss.py").write_text("def loss(*, chunk=1):\n    return chunk\n")
    words = ("output_dir=x", "optimizer=torch.optim.SGD", "dataset=a.csv")
    permissions = load(recipe, None, words).values["optimizer"].permissions
    mine = Component("beside_loss.loss", key="loss", permissions=permissions)
    assert mine.build(soft_cap=None) == 1
    with pytest.raises(ConfigError, match=r"loss: the model needs soft_cap=30\.0, which beside_l"):
        mine.build(soft_cap=30.0)


def test_nested_components_are_checked_and_built(nested):
    word = "optimizer.inner={_component_: beside_nested.inner, size: x, namee: y}"
    assert nested(word).check() == [
        "optimizer.inner.size: a whole number is needed, not x",
        "optimizer.inner.namee: beside_nested.inner takes no namee;"
        " did you mean optimizer.inner.name?",
        "optimizer.inner.name: beside_nested.inner needs it: set optimizer.inner.name=...",
    ]
    built = nested("optimizer.inner={_component_: beside_nested.inner, size: 2, name: 007}").build()
    assert built == ((2, "007"), (), "")


def test_a_nested_component_outside_is_refused_by_its_text(nested):
    with pytest.raises(ConfigError, match=r"optimizer\.inner: os\.system is outside"):
        nested("optimizer.inner={_component_: os.system}")
    with pytest.raises(ConfigError, match=r"optimizer\.things\.0: os\.system is outside"):
        nested("optimizer.inner=1", "optimizer.things=[{_component_: os.system}]")


def test_an_argument_is_text_where_its_parameter_is(nested):
    for word in ("on", "007", "12:30", "1e-5"):
        assert nested("optimizer.inner=1", f"optimizer.label={word}").build()[2] == word
    assert nested("optimizer.inner=1e-5").build()[0] == 1e-5


def test_a_missing_keyword_argument_is_named(nested):
    assert nested().check() == [
        "optimizer.inner: beside_nested.outer needs it: set optimizer.inner=..."
    ]
    with pytest.raises(ConfigError, match="missing a required"):
        nested().build()


def test_offered_arguments_fill_only_what_the_config_leaves_open(nested):
    assert nested("optimizer.inner=1").build(label="offered", unknown=3)[2] == "offered"
    set_by_config = nested("optimizer.inner=1", "optimizer.label=mine")
    assert set_by_config.build(label="offered")[2] == "mine"


def test_an_argument_changed_by_the_recipe_counts(nested):
    component = nested("optimizer.inner=1", "optimizer.label=mine")
    component.arguments["label"] = "changed"
    assert component.build()[2] == "changed"


def test_a_module_that_fails_to_import_is_one_sentence(recipe: Path):
    (recipe.parent / "beside_broken.py").write_text("1 / 0\n")
    component = Component("beside_broken.x", key="k", permissions=Permissions(recipe.parent))
    with pytest.raises(ConfigError, match="k: importing beside_broken failed: ZeroDivisionError"):
        _ = component.target


def test_a_missing_library_is_named_with_its_install(recipe: Path):
    (recipe.parent / "beside_needs.py").write_text("import not_installed_here\n")
    component = Component("beside_needs.x", key="k", permissions=Permissions(recipe.parent))
    with pytest.raises(ConfigError, match="needs not_installed_here: pip install"):
        _ = component.target


def test_an_optimizers_own_refusal_of_a_value_is_a_config_error():
    import torch

    component = Component("torch.optim.AdamW", {"lr": -1.0}, key="optimizer")
    with pytest.raises(ConfigError, match=r"optimizer: .*Invalid learning rate"):
        component.build([torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    ("key", "path", "word"),
    [
        ("optimizer", "torch.optim.lr_scheduler.StepLR", "optimizer"),
        ("optimizer", "torch.optim.lr_scheduler.LRScheduler", "optimizer"),
        ("optimizer", "solotune.optim.decay_groups", "optimizer"),
        ("optimizer", "bitsandbytes.optim.GlobalOptimManager", "optimizer"),
        ("model", "solotune.models.KVCache", "model"),
        ("model", "solotune.models.read_config", "model"),
        ("loss", "torch.optim.AdamW", "loss"),
        ("loss", "solotune.losses.linear_cross_entropy.Targets", "loss"),
        ("dataset", "solotune.data.make_loader", "data set"),
        ("dataset_val", "solotune.tokenizers.auto", "data set"),
        ("tokenizer", "solotune.tokenizers.check_vocabulary", "tokenizer"),
        ("lr_scheduler", "solotune.training.set_lr", "schedule"),
        ("lr_scheduler", "solotune.training.RunLog", "schedule"),
        ("lr_scheduler", "torch.optim.lr_scheduler.StepLR", "schedule"),
    ],
)
def test_a_component_of_another_kind_is_refused_by_what_it_is(key, path, word):
    (fault,) = Component(path, key=key).check()
    assert fault.startswith(f"{key}: {path} is no {word}: name one of ")


@pytest.mark.parametrize(
    ("key", "path"),
    [
        *DEFAULT_PATHS.items(),
        ("dataset", "solotune.data.pydoc_dataset"),
        ("lr_scheduler", "solotune.training.cosine"),
        ("lr_scheduler", "solotune.training.linear"),
        ("model", "solotune.models.llama3_8b"),
        ("optimizer", "bitsandbytes.optim.AdamW8bit"),
        ("optimizer", "solotune.optim.AdamWKahan"),
        ("optimizer", "torch.optim.SGD"),
        ("optimizer", "torchao.optim.AdamW4bit"),
    ],
)
def test_a_component_of_the_right_kind_is_taken(key, path):
    assert Component(path, key=key).target


KINDS = """
import torch
from solotune.data import SampleSet

class Loss(torch.nn.Module):
    def __init__(self, *, weight: float = 1.0):
        raise ValueError("weight")

class Optimizer(torch.optim.Optimizer):
    def __init__(self, named_parameters):
        raise ValueError("wants names")

def loss() -> int:
    return 1

def rows(tokenizer) -> SampleSet: ...

def steps(total_steps):
    return lambda step: 1 / 0
"""


def test_what_lies_beside_a_copied_recipe_is_judged_too_but_not_built(recipe: Path):
    (recipe.parent / "beside_kinds.py").write_text(KINDS)
    words = ["dataset=beside_kinds.rows", "lr_scheduler=beside_kinds.steps", "output_dir=x"]
    words += ["optimizer=beside_kinds.Optimizer"]
    load(recipe, None, [*words, "loss=beside_kinds.Loss"]).check_components()
    with pytest.raises(ConfigError, match=r"^loss: beside_kinds\.loss is no loss"):
        load(recipe, None, [*words, "loss=beside_kinds.loss"]).check_components()


def test_a_choice_lists_the_choices():
    for key, choices in {
        "format": "messages, conversations, prompt, instruction, text or None",
        "train_on": "all or last",
        "history": "per_turn or as_rendered",
        "on_bad_row": "stop or skip",
    }.items():
        component = Component("solotune.data.dataset", {"source": "x", key: "never"}, "dataset")
        assert component.check() == [f"dataset.{key}: {choices} is needed, not the text 'never'"]
    component = Component("solotune.data.pydoc_dataset", {"split": "test"}, "dataset")
    assert component.check() == [
        "dataset.split: train, validation or all is needed, not the text 'test'"
    ]


def test_a_number_below_the_least_is_refused_with_its_line(load_yaml, tmp_path: Path):
    loaded = load_yaml("dataset.max_rows=0", more="tokenizer:\n  max_seq_len: 1\n")
    with pytest.raises(ConfigError) as error:
        loaded.check_components()
    assert str(error.value).splitlines() == [
        "2 faults in the config",
        "  dataset.max_rows: 1 or more is needed, not 0",
        f"  tokenizer.max_seq_len: 2 or more is needed, not 1 ({tmp_path / 'tiny.yaml'}:9)",
    ]
    words = ("dataset.max_rows=1", "tokenizer.max_seq_len=2", "dataset_val=x.csv")
    load_yaml(*words, "dataset_val.max_rows=null").check_components()


def test_values_that_a_component_itself_refuses_are_found_without_weights(
    load_yaml, tmp_path: Path
):
    more = "loss: {chunk_tokens: 0}\nlr_scheduler:\n"
    more += "  _component_: solotune.training.cosine\n  warmup_ratio: 5\n"
    loaded = load_yaml("optimizer.weight_decay=-0.5", more=more)
    with pytest.raises(ConfigError) as error:
        loaded.check_components()
    file = tmp_path / "tiny.yaml"
    assert str(error.value).splitlines() == [
        "3 faults in the config",
        "  optimizer.weight_decay=-0.5: use 0 or more",
        f"  loss.chunk_tokens=0: use at least 1, or null ({file}:8)",
        f"  lr_scheduler.warmup_ratio=5.0: use a value from 0 to 1 ({file}:11)",
    ]
    for words in (
        ["optimizer.betas=[1.5, 0.9]"],
        ["optimizer=torch.optim.Optimizer"],
        ["optimizer=torchao.optim.AdamW8bit", "optimizer.betas=[0.9]"],
        ["optimizer.fused=True", "optimizer.foreach=True"],
    ):
        with pytest.raises(ConfigError, match=r"^optimizer: torch"):
            load_yaml(*words).check_components()


def test_checking_a_warmup_prints_no_warning_of_a_run_that_is_not_known_yet(load_yaml, capsys):
    words = ("lr_scheduler=solotune.training.cosine", "lr_scheduler.num_warmup_steps=100")
    load_yaml(*words).check_components()
    assert capsys.readouterr() == ("", "")
