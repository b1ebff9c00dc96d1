"""Tokens that a user adds: ids, templates that need them, saved folders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from solotune import data, tokenizers
from solotune.errors import ConfigError

Write = Callable[..., Path]
CHATML = ["<|im_start|>", "<|im_end|>"]
CHAT = [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c"}]


def write_base(write_tokenizer: Write, folder: Path, **options: object) -> Path:
    """Write a base model's tokenizer: 258 tokens, no template."""
    return write_tokenizer(folder, template=None, specials=("<s>", "</s>"), **options)


def test_added_tokens_get_the_next_ids_and_are_special(
    write_tokenizer: Write, tmp_path: Path
) -> None:
    folder = write_base(write_tokenizer, tmp_path)
    tokenizer = tokenizers.auto(folder, added_tokens=["<|im_start|>", "</s>", "<|im_end|>"])
    assert (tokenizer.new_ids, tokenizer.rows_wanted, tokenizer.vocab_size) == (
        (258, 259),
        260,
        260,
    )
    assert tokenizer.encode("a<|im_end|>", allow_special=True) == [ord("a"), 259]
    assert tokenizer.encode("a<|im_end|>") == list(b"a<|im_end|>")
    assert tokenizer.decode([259, ord("a")], skip_special=True) == "a"
    without = tokenizers.auto(folder)
    assert (without.new_ids, without.rows_wanted, without.vocab_size) == ((), 0, 258)


def test_chatml_works_with_added_tokens(write_tokenizer: Write, tmp_path: Path) -> None:
    folder = write_base(write_tokenizer, tmp_path, adds_bos=True)
    tokenizer = tokenizers.auto(folder, chat_template="chatml", added_tokens=CHATML)
    ids = tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    assert ids[:2] == [256, 258]
    assert (ids.count(256), ids.count(258), ids.count(259)) == (1, 2, 2)
    assert tokenizer.stop_ids() == [257, 259]


def test_a_chosen_template_does_not_write_tokens_that_are_lacking(
    write_tokenizer: Write, tmp_path: Path
) -> None:
    folder = write_base(write_tokenizer, tmp_path)
    template = tmp_path / "zephyr.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    )
    message = r"writes <\|user\|> and <\|assistant\|>, .* tokenizer.added_tokens=\[<\|user\|>, <\|"
    with pytest.raises(ConfigError, match=message):
        tokenizers.auto(folder, chat_template=str(template))
    tokenizers.auto(folder, chat_template=str(template), added_tokens=["<|user|>", "<|assistant|>"])
    # the model's own template is as its makers trained it, and the fact is told
    (folder / "chat_template.jinja").write_bytes(template.read_bytes())
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}')
    lines = data.dataset(tokenizers.auto(folder), source=str(rows)).lines()
    assert any("writes <|user|> and <|assistant|>, which the tokenizer splits" in x for x in lines)


@pytest.mark.parametrize("decoder", [False, True])
def test_a_saved_folder_has_the_added_tokens_in_transformers_too(
    decoder: bool, write_tokenizer: Write, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    known = {256: "<s>", 257: "</s>"}
    config = {
        "added_tokens_decoder": {
            str(token_id): {"content": text, "special": True, **flags}
            for token_id, text in known.items()
        }
    }
    folder = write_base(write_tokenizer, tmp_path / "base", **(config if decoder else {}))
    saved = tmp_path / "saved"
    saved.mkdir()
    ours = tokenizers.auto(folder, chat_template="chatml", added_tokens=CHATML)
    ours.save(saved)
    # opened again with the same key, nothing is new
    for options in ({}, {"chat_template": "chatml", "added_tokens": CHATML}):
        again = tokenizers.auto(saved, **options)
        assert (again.new_ids, again.vocab_size) == ((), 260)
        assert again.encode_chat(CHAT) == ours.encode_chat(CHAT)
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    assert len(theirs) == 260
    assert theirs.convert_tokens_to_ids(CHATML) == [258, 259]
    chat = [{"role": "user", "content": "hello"}]
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    assert ids["input_ids"] == ours.encode_chat(chat)


def test_ids_are_kept_where_the_vocabulary_has_gaps(write_tokenizer: Write, tmp_path: Path) -> None:
    folder = write_base(write_tokenizer, tmp_path)
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    definition["model"]["vocab"]["zz"] = 270
    path.write_text(json.dumps(definition))
    tokenizer = tokenizers.auto(folder, added_tokens=CHATML)
    assert tokenizer.new_ids == (271, 272)
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [272]


def test_control_tokens_that_the_file_does_not_call_special_end_turns(
    write_tokenizer: Write, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"special": true', '"special": false'))
    tokenizer = tokenizers.auto(folder)
    assert tokenizer.stop_ids() == [257, 259]
    ids = tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    assert (ids.count(258), ids.count(259)) == (2, 2)
    assert tokenizer.decode(ids).count("<|im_end|>") == 3


def test_an_entry_of_the_vocabulary_is_no_control_token(
    write_tokenizer: Write, tmp_path: Path
) -> None:
    folder = write_base(write_tokenizer, tmp_path)
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    definition["model"]["vocab"] |= {"<|im_start|>": 258, "<|im_end|>": 259}
    path.write_text(json.dumps(definition))
    with pytest.raises(ConfigError, match=r"add them with tokenizer.added_tokens"):
        tokenizers.auto(folder, chat_template="chatml")
    tokenizer = tokenizers.auto(folder, chat_template="chatml", added_tokens=CHATML)
    assert (tokenizer.new_ids, tokenizer.rows_wanted) == ((), 260)
    assert tokenizer.encode_chat(CHAT).count(258) == 3


def test_an_empty_token_is_refused(write_tokenizer: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.added_tokens holds an empty text"):
        tokenizers.auto(write_base(write_tokenizer, tmp_path), added_tokens=[""])
