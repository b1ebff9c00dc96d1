"""Tokenizer folders: ids, special tokens, templates in each of their places, saving."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from solotune import tokenizers
from solotune.errors import CheckpointError, ConfigError, DataError
from solotune.tokenizers import CHATML, ChatTemplate

Write = Callable[..., Path]
QUESTION = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer_dir: Path) -> tokenizers.Tokenizer:
    return tokenizers.auto(tiny_tokenizer_dir)


@given(text=st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=40))
def test_ids_equal_those_of_the_tokenizers_library(text: str, tiny: tokenizers.Tokenizer) -> None:
    tokenizer = tiny
    reference = Reference.from_file(str(tiny.folder / "tokenizer.json"))
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_ids_only_where_allowed(tiny_tokenizer_dir: Path) -> None:
    """Field case 9."""
    tokenizer = tokenizers.auto(tiny_tokenizer_dir)
    text = "a<|im_end|>b"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.encode(text, allow_special=True) == [ord("a"), 259, ord("b")]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([ord("a"), 259, ord("b")], skip_special=True) == "ab"


def test_bos_and_eos_are_added_once(tiny_tokenizer_dir: Path) -> None:
    tokenizer = tokenizers.auto(tiny_tokenizer_dir)
    assert tokenizer.encode("a", add_bos=True, add_eos=True) == [256, ord("a"), 257]
    again = tokenizer.encode("<s>a</s>", add_bos=True, add_eos=True, allow_special=True)
    assert again == [256, ord("a"), 257]


def test_merges_and_vocabulary_size_are_those_of_the_file(
    write_tokenizer: Write, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path, merges=(("a", "b"), ("ab", "c")))
    tokenizer = tokenizers.auto(folder)
    assert tokenizer.vocab_size == 262
    assert tokenizer.encode("xabcab") == [ord("x"), 261, 260]


def test_unigram_and_added_tokens_outside_the_vocabulary_keep_their_ids(tmp_path: Path) -> None:
    pieces = ["<unk>", "▁a", "b", "▁", "a"]
    added = [("<unk>", 0, True), ("<|end|>", 5, True), ("<tool>", 6, False)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    definition = {
        "version": "1.0",
        "added_tokens": [
            {"id": token_id, "content": text, "special": special, **flags}
            for text, token_id, special in added
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[piece, -float(k)] for k, piece in enumerate(pieces)],
            "byte_fallback": False,
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    template = "{{ messages[0].content }}<|end|>{{ messages[0].content }}<|end|>"
    config = {"eos_token": {"content": "<|end|>", "special": True}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = tokenizers.auto(tmp_path)
    reference = Reference.from_str(json.dumps(definition))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (7, 5, None)
    ids = tokenizer.encode_chat([{"role": "user", "content": "a<tool>b"}])
    assert ids == reference.encode("a<tool>b<|end|>a<tool>b<|end|>").ids
    assert ids.count(5) == 2
    assert 5 not in tokenizer.encode("a<|end|>b")


@pytest.mark.parametrize("place", ["config", "named list", "jinja file"])
def test_the_template_is_found_in_each_of_its_places(
    place: str, write_tokenizer: Write, tmp_path: Path
) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    template = {"config": CHATML, "named list": named, "jinja file": "not this one"}[place]
    folder = write_tokenizer(tmp_path, template=template)
    if place == "jinja file":
        (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    template = tokenizers.auto(folder).require_template()
    assert template.render(QUESTION) == "<|im_start|>user\nq<|im_end|>\n"
    assert template.terminator == "<|im_end|>"


def test_chatml_for_a_base_model_keeps_its_bos(write_tokenizer: Write, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=None, adds_bos=True)
    assert tokenizers.auto(folder).template is None
    tokenizer = tokenizers.auto(folder, chat_template="chatml")
    assert tokenizer.encode_chat(QUESTION)[:2] == [256, 258]
    assert tokenizer.stop_ids() == [257, 259]


def test_chatml_needs_its_control_tokens(write_tokenizer: Write, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=None, specials=("<s>", "</s>"))
    repair = re.escape("tokenizer.added_tokens=[<|im_start|>, <|im_end|>]")
    with pytest.raises(ConfigError, match=rf"chatml writes .* no token: add them with {repair}"):
        tokenizers.auto(folder, chat_template="chatml")


def test_stop_ids_hold_terminator_eos_and_those_of_the_generation_config(
    write_tokenizer: Write, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    assert tokenizers.auto(folder).stop_ids() == [256, 257, 259]


def test_bos_and_eos_come_from_config_json_where_the_tokenizer_names_none(
    write_tokenizer: Write, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path, bos_token=None, eos_token=None)
    (folder / "config.json").write_text('{"bos_token_id": 256, "eos_token_id": [257, 259]}')
    tokenizer = tokenizers.auto(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)


def test_a_saved_folder_opens_with_the_template_that_was_used(
    write_tokenizer: Write, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "base", template="old {{ messages[0].content }}")
    chosen = tmp_path / "mine.jinja"
    chosen.write_text("new {{ messages[0].content }}\n", encoding="utf-8")
    for choice, expected in ((None, "old q"), (str(chosen), "new q")):
        saved = tmp_path / f"saved-{expected}"
        saved.mkdir()
        tokenizers.auto(folder, chat_template=choice).save(saved)
        assert tokenizers.auto(saved).require_template().render(QUESTION) == expected
        config = json.loads((saved / "tokenizer_config.json").read_text())
        assert ("chat_template" in config) == (choice is None)
        assert config["eos_token"] == "</s>"


def test_a_saved_folder_opens_in_transformers(write_tokenizer: Write, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder, saved = write_tokenizer(tmp_path / "base", template=None), tmp_path / "saved"
    saved.mkdir()
    ours = tokenizers.auto(folder, chat_template="chatml")
    ours.save(saved)
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    ids = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)
    assert ids["input_ids"] == ours.encode_chat(QUESTION)


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        (
            {},
            {},
            r"holds no tokenizer \(tokenizer.json, .*\): set checkpoint_dir or tokenizer.path",
        ),
        ({"vocab.json": "{}", "merges.txt": ""}, {}, "let transformers write a tokenizer.json"),
        ({"tokenizer.json": "version https://git-lfs"}, {}, "is a Git LFS pointer"),
        ({"tokenizer.model": "version https://git-lfs"}, {}, "is a Git LFS pointer"),
        ({"tokenizer.model": "IQ== 0\nIg== 2\n"}, {}, "line 2: not a token in base64"),
        ({"tokenizer.model": "IQ== 0\nIg== 1\n"}, {}, "2 tiktoken ranks, which belong to no known"),
        ({"tokenizer.model": "nonsense"}, {}, "is no sentencepiece model"),
        ({"tekken.json": '{"vocab": [], "config": {}}'}, {}, "is no tekken.json .*fetch the file"),
        ({"tokenizer.json": "{"}, {}, "tokenizer.json is not JSON"),
        ({"tokenizer.json": "{}"}, {}, "tokenizer.json cannot be used"),
        ({}, {"path": "/nowhere"}, "tokenizer.path=/nowhere: no such folder"),
    ],
)
def test_an_unusable_folder_is_named_with_the_repair(
    files: dict[str, str], arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        tokenizers.auto(tmp_path, **arguments)


def test_wrong_keys_are_named(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.chat_template=x.jinja: no such file"):
        tokenizers.auto(tiny_tokenizer_dir, chat_template="x.jinja")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.role }")
    with pytest.raises(ConfigError, match=r"broken.jinja, line 2"):
        tokenizers.auto(tiny_tokenizer_dir, chat_template=str(broken))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(DataError, match=r"unsafe|undefined|not safely callable"):
        ChatTemplate(attack).render(QUESTION)
