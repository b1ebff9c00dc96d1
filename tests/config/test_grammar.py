"""What a word of YAML or of the command line means (field cases 24 to 29)."""

import math
from pathlib import Path

import pytest
import yaml as pyyaml
from hypothesis import given
from hypothesis import strategies as st

from solotune.config.interpolation import interpolate
from solotune.config.nodes import Mapping, Scalar, plain, read_file, scalar_value, to_node, write
from solotune.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e-5", 1e-5), ("2E+3", 2e3), (".5", 0.5), ("2.", 2.0), ("-1.5", -1.5), (".inf", math.inf),
        ("12", 12), ("-3", -3), ("0", 0),
        ("true", True), ("True", True), ("FALSE", False),
        ("null", None), ("None", None), ("~", None),
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"),
        ("007", "007"), ("12:30", "12:30"), ("1_000", "1_000"), ("0x1F", "0x1F"),
        ("2030-01-01", "2030-01-01"), ("1e", "1e"), ("=", "="),
    ],
)  # fmt: skip
def test_a_word_without_a_type_is_read_by_the_grammar(word, value, load_yaml):
    by_yaml = load_yaml(more=f"extra: {{x: {word}}}").values["extra"]["x"]
    by_override = load_yaml(f"extra.x={word}").values["extra"]["x"]
    for found in (by_yaml, by_override):
        assert found == value
        assert type(found) is type(value)


def test_scientific_notation_is_a_float_in_yaml_and_override(load_yaml):
    assert load_yaml("lr=1e-5").values["lr"] == 1e-5
    arguments = load_yaml("optimizer.lr=1e-5").values["optimizer"].arguments
    assert arguments == {"lr": 1e-5, "weight_decay": 0.1}
    assert load_yaml().values["optimizer"].arguments["lr"] == 2e-5


@pytest.mark.parametrize("word", ["None", "null", "~"])
def test_nulls_unset_a_key_that_may_be_unset(load_yaml, word):
    assert load_yaml(f"clip_grad_norm={word}").values["clip_grad_norm"] is None
    assert load_yaml(f"run_name={word}").values["run_name"] is None
    assert load_yaml(more=f"clip_grad_norm: {word}").values["clip_grad_norm"] is None


def test_an_empty_yaml_value_is_null_and_an_empty_override_is_empty_text(load_yaml):
    assert load_yaml(more="clip_grad_norm:").values["clip_grad_norm"] is None
    assert load_yaml("run_name=").values["run_name"] == ""
    with pytest.raises(ConfigError, match="clip_grad_norm: a number or None is needed, not an emp"):
        load_yaml("clip_grad_norm=")


@pytest.mark.parametrize("word", ["None", "null", "~"])
def test_null_for_a_key_that_needs_a_value_is_a_fault(load_yaml, word):
    with pytest.raises(ConfigError, match="output_dir: text is needed"):
        load_yaml(f"output_dir={word}" if word != "~" else "output_dir=~")


def test_an_override_is_split_at_the_first_equals_sign(load_yaml):
    loaded = load_yaml("output_dir=/tmp/a=1", "dataset.column_map.input=x=y")
    assert loaded.values["output_dir"] == "/tmp/a=1"
    assert loaded.values["dataset"].arguments["column_map"] == {"input": "x=y"}


def test_lists_with_spaces_are_lists(load_yaml):
    assert load_yaml("names=[q_proj, v_proj]").values["names"] == ["q_proj", "v_proj"]
    assert load_yaml("grid=[[a, 1], [b, 2]]").values["grid"] == [["a", 1], ["b", 2]]
    assert load_yaml("names=[]").values["names"] == []
    loaded = load_yaml("optimizer.betas=[0.9, 0.5]", "dataset.column_map={input: x}")
    assert loaded.values["optimizer"].arguments["betas"] == [0.9, 0.5]
    assert loaded.values["dataset"].arguments["column_map"] == {"input": "x"}


def test_a_text_key_keeps_brackets(load_yaml):
    assert load_yaml("output_dir=[INST] hello").values["output_dir"] == "[INST] hello"


@pytest.mark.parametrize(
    "word", ["lr", "1e-5", "=5", "a..b=1", ".a=1", "a.=1", "~", "~lr=1", "1=2"]
)
def test_a_word_that_is_no_override_is_a_usage_error(load_yaml, word):
    with pytest.raises(UsageError):
        load_yaml(word)


def test_home_expands_in_yaml_and_override(load_yaml, monkeypatch):
    monkeypatch.setenv("HOME", "/tmp/h")
    assert load_yaml("output_dir=~/run").values["output_dir"] == "/tmp/h/run"
    loaded = load_yaml(change=("output_dir: out", "output_dir: ~/run"))
    assert loaded.values["output_dir"] == "/tmp/h/run"
    assert load_yaml("output_dir=~/").values["output_dir"] == "/tmp/h"
    assert load_yaml("output_dir=~x\\y").values["output_dir"] == "~x\\y"
    assert load_yaml("dataset=~/x.jsonl").values["dataset"].arguments["source"] == "/tmp/h/x.jsonl"


@pytest.mark.parametrize("word", ["on", "007", "12:30", "1e-5", "true", "12"])
def test_a_text_key_is_taken_verbatim(load_yaml, word):
    assert load_yaml(f"output_dir={word}").values["output_dir"] == word
    assert load_yaml(change=("out\n", f"{word}\n")).values["output_dir"] == word
    assert load_yaml(f"names=[{word}]").values["names"] == [word]


def test_a_quoted_word_is_text(load_yaml):
    assert load_yaml("run_name='None'").values["run_name"] == "None"
    assert load_yaml(more="run_name: 'null'").values["run_name"] == "null"
    with pytest.raises(ConfigError, match=r"steps: a whole number is needed, not the text '3'"):
        load_yaml("steps='3'")


def test_a_truth_value_or_text_key_takes_both(load_yaml):
    key = "resume_from_checkpoint"
    assert load_yaml(f"{key}=True").values[key] is True
    assert load_yaml(f"{key}=runs/a/step_3").values[key] == "runs/a/step_3"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=1.5", "steps: a whole number is needed, not 1.5"),
        ("steps=1e3", "steps: a whole number is needed, not 1e3"),
        ("steps=True", "steps: a whole number is needed, not True"),
        ("shuffle=1", "shuffle: True or False is needed, not 1"),
        ("shuffle=yes", "shuffle: True or False is needed, not yes"),
        ("lr=fast", "lr: a number is needed, not fast"),
        ("ac_mode=some", "ac_mode: full or selective is needed, not some"),
        ("names=q_proj", "names: a list (each: text) or None is needed, not q_proj"),
        ("dataset_val.packed=True", None),
    ],
)
def test_a_value_of_another_type_names_key_and_type(load_yaml, override, message):
    if message is None:
        load_yaml(override)
        return
    with pytest.raises(ConfigError) as error:
        load_yaml(override)
    assert str(error.value) == message


def test_whole_numbers_are_floats_where_a_float_is_wanted(load_yaml):
    value = load_yaml("lr=1").values["lr"]
    assert (value, type(value)) == (1.0, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nlr: 2\n", "lr: set twice"),
        ("extra:\n  a: 1\n  a: 2\n", "extra.a: set twice"),
        ("extra: !!python/object/apply:os.system [id]\n", "tag .* is refused"),
        ("extra: !thing 3\n", "tag .* is refused"),
        ("extra: &a [*a]\n", "anchors and aliases are refused"),
        ("extra: [a\n", "not YAML"),
        ("extra: a\tb: c\n", "not YAML"),
        ("? [a]\n: 1\n", "a key is one word"),
    ],
)
def test_bad_yaml_is_a_fault_with_file_and_line(load_yaml, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_yaml(more=text)
    assert "tiny.yaml:" in str(error.value)


def test_a_file_that_is_not_text_is_named(tmp_path: Path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"output_dir: \xe9t\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8"):
        read_file(path)


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfa: 1\n", b"a: 1\r\nb: x\r\n", b"# a\n\n"])
def test_byte_order_mark_windows_lines_and_an_empty_file_are_read(tmp_path: Path, content):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    tree, faults = read_file(path)
    assert faults == []
    assert set(plain(tree)) <= {"a", "b"}


words = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=12) | st.text(
    st.sampled_from(list("${}\\:#-~'\"[], a1.\n")), max_size=8
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(words.filter(bool), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), trees, max_size=4))
def test_what_is_written_is_read_back(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("written") / "c.yaml"
    path.write_text(write(Mapping({k: to_node(v) for k, v in tree.items()})), encoding="utf-8")
    found, faults = read_file(path)
    assert faults == []
    assert interpolate(found) == {}
    assert plain(found) == {k: _home_free(v) for k, v in tree.items()}
    pyyaml.compose(path.read_text(encoding="utf-8"))  # and any other reader takes it


def _home_free(value):
    return plain(to_node(value))


def test_scalar_value_of_a_quoted_word_is_its_text():
    assert scalar_value(Scalar("12", quoted=True)) == "12"
