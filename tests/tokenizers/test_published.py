# ruff: noqa: RUF001 (scripts are meant)
"""Published tokenizer files: ids of their makers' libraries, control tokens, BOS, masks, saving."""

import json
import random
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solotune import data, tokenizers
from tests.tokenizers.published import Published, published_file, write_folder

CORPUS = (
    *("", " ", "a", " a", "  a", "a ", "\n", "\r\n", "\r\n\r\n \t\n", "a\n\n\nb", "\n" * 50),
    *("\t\t\tx = 1\n\t\ty", "def f(x):\n    return x**2  # café\n\n\nclass A:\n\tpass\n"),
    *('{"k": [1, 2.5, null], "é": "\\u00e9"}', "http://a.b/c?d=e&f=%20#g", "1,234.5e-10 ½²³ ٣٤٥"),
    *("Hello, world! It's we'll THEY'RE I'D 'S 'ſ", "don't  stop", "'''s 't'T"),
    *("日本語のテキスト。漢字かな交じり文", "中文文本，测试一下。", "한국어 텍스트입니다"),
    *("العربية نص طويل", "עברית", "हिन्दी में पाठ", "ภาษาไทย", "Русский ёЁ", "Ελληνικά", "Việt"),
    *(
        "ÀÉÎõü ÇĞ İı ß ẞ",
        "\ufb01 \ufb00 \u212b \u2126 \u2135",
        "\U0001d4b3\U0001d518 𐍈 𓀀 🀄",
        "e\u0301 a\u0308 x\u0300\u0301\u0302y",
    ),
    *("👨‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪 😀😀", "\u200b\u200c\u200d\ufeff\u202e", "\u2060\u180e"),
    *(
        "\x00\x01\x02\x1b[31m\x7f\x80\x85\x9f",
        "\u00a0\u2003\u3000\u2028\u2029 x",
        "\ue000\U0010ffff",
    ),
    *("a" * 3000, "ab" * 500, "=-" * 80, " " * 3 + "x" + " " * 17 + "y" + " " * 100, " " * 1000),
    *("a\u2581b \u2581\u2581c", "<0x0A><0xE2>", "[REFERENCE_DOC_0]a[REFERENCE_DOC_12] b[REF"),
)
FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Unassigned code points are left out: normalisation of them depends on the version of Unicode.
TEXT = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=("Cs", "Cn"))),
        st.text(" \n\t\r\u3000ab'1.=", max_size=40),
        st.sampled_from(
            ("the", " and", "'re", "<s>", "[INST]", "▁", "<0x41>", "ing", "日本", "😀")
        ),
    )
).map("".join)


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_ids_are_those_of_the_makers_library(published: Published, number: int) -> None:
    ids = published.ours.encode(CORPUS[number])
    assert ids == published.encode(CORPUS[number])
    assert published.ours.decode(ids) == published.kept(CORPUS[number])


@FEW
@given(text=TEXT)
def test_ids_of_any_text_are_those_of_the_makers_library(published: Published, text: str) -> None:
    ids = published.ours.encode(text)
    assert ids == published.encode(text)
    assert published.ours.decode(ids) == published.kept(text)


def test_every_code_point_is_split_as_the_makers_library_splits_it(published: Published) -> None:
    """The two use different engines of regular expressions, with their own tables of classes."""
    chars = [chr(code) for code in range(0x3200) if not 0xD800 <= code < 0xE000]
    chars += random.Random(0).sample([chr(code) for code in range(0xE000, 0x110000)], 2000)
    chars = [char for char in chars if unicodedata.category(char) != "Cn"]
    texts = [f"a{char}1 {char}{char}.{char}A" for char in chars if not "\ufdd0" <= char <= "\ufdef"]
    assert [published.ours.encode(text) for text in texts] == [*map(published.encode, texts)]


def test_control_tokens_in_a_text_are_plain_and_come_back(published: Published) -> None:
    """Field case 9."""
    tokenizer = published.ours
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for token_id in [*first, *tokenizer.stop_ids()]:
        text = tokenizer.token_text(token_id)
        question = f"What does {text} mean?"
        ids = tokenizer.encode(question)
        assert token_id not in ids
        assert ids == published.encode(question)
        assert tokenizer.decode(ids) == question
        assert tokenizer.encode(str(text), allow_special=True) == [token_id]
        assert tokenizer.decode([token_id]) == text
        assert tokenizer.decode([token_id], skip_special=True) == ""


def test_bos_stands_once_in_text_rows_and_chats(published: Published, tmp_path: Path) -> None:
    """Field case 7."""
    rows = {
        "text": [{"text": "a b c"}],
        "chat": [{"prompt": "a", "completion": "b c"}],
    }
    for name, content in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
        tokens = data.dataset(published.ours, source=str(path)).sample(0)[0].tolist()
        if published.bos is None:
            assert published.ours.bos_id is None
        else:
            assert published.ours.token_text(published.ours.bos_id) == published.bos
            assert tokens[0] == published.ours.bos_id
            assert tokens.count(published.ours.bos_id) == 1


def test_trained_tokens_are_the_answer_and_its_terminator(
    published: Published, tmp_path: Path
) -> None:
    answers = ("🜁 yes 🜂", "é", "a <s></s><|eot_id|><|im_end|> b", "\u1ea5x", "123  \n4")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "q🜁", "completion": a}) + "\n" for a in answers))
    samples = data.dataset(published.ours, source=str(path))
    terminator = published.ours.require_template().terminator
    found = set()
    for index in range(len(samples)):
        tokens, trained = samples.sample(index)
        found.add(published.ours.decode(tokens[trained.astype(bool)].tolist()))
    # a space that the tokenizer puts before a text is the model's to write, and no text
    assert found == {answer + str(terminator) for answer in answers}


def test_eos_is_trained_where_it_is_also_the_padding(published: Published, tmp_path: Path) -> None:
    """Field case 8."""
    config = {"pad_token": published.eos, "eos_token": published.eos}
    write_folder(tmp_path, published.file, name=published.name, template=None, **config)
    tokenizer = tokenizers.auto(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "a b c d e f g"}\n')
    samples = data.dataset(tokenizer, source=str(path), packed=False)
    (batch,) = data.make_loader(samples, batch_size=2, max_seq_len=64, seed=0).epoch(0)
    assert (batch.labels_BS == tokenizer.eos_id).sum(1).tolist() == [1, 1]


def test_a_saved_folder_has_equal_ids_in_transformers(published: Published, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    base, saved = tmp_path / "base", tmp_path / "saved"
    base.mkdir()
    saved.mkdir()
    template = published.ours.require_template().source
    write_folder(base, published.file, name=published.name, template=template, legacy=True)
    ours = tokenizers.auto(base)
    ours.save(saved)
    (saved / "config.json").write_text(json.dumps({"model_type": published.model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    again = tokenizers.auto(saved)
    chat = [{"role": "user", "content": "a 🜁  b"}, {"role": "assistant", "content": "\n c"}]
    ids = theirs.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert ids == ours.encode_chat(chat, add_generation_prompt=False)
    assert ids == again.encode_chat(chat, add_generation_prompt=False)
    for text in CORPUS:
        ids = ours.encode(text, allow_special=True)
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert again.encode(text, allow_special=True) == ids
        assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.encode("a") == ours.encode("a", add_bos=ours.adds_bos)
    assert (again.bos_id, again.eos_id, again.adds_bos) == (ours.bos_id, ours.eos_id, ours.adds_bos)


def test_a_class_that_transformers_rebuilds_is_not_left_in_a_saved_folder(tmp_path: Path) -> None:
    """It would put a space before the whole text only, and not twice: other ids than trained."""
    transformers = pytest.importorskip("transformers")
    file = published_file("mistral_common/data/tokenizer.model.v1")
    folders = [tmp_path / name for name in ("file", "base", "saved")]
    for folder in folders:
        folder.mkdir()
    write_folder(folders[0], file, name="tokenizer.model", template=None)
    tokenizers.auto(folders[0]).save(folders[1])
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "legacy": False}
    (folders[1] / "tokenizer_config.json").write_text(json.dumps(config))
    ours = tokenizers.auto(folders[1], added_tokens=["<|im_end|>"])
    ours.save(folders[2])
    (folders[2] / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(folders[2])
    for text in (" a", "</s>[INST] b", "a<|im_end|>\n"):
        ids = ours.encode(text, allow_special=True)
        assert theirs.encode(text, add_special_tokens=False) == ids
    assert theirs.encode("a")[0] == ours.bos_id == theirs.bos_token_id
