"""sentencepiece models made on the spot: what is read exactly, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from solotune import tokenizers
from solotune.errors import CheckpointError
from tests.tokenizers.published import published_file

TEXTS = (
    "the cat sat on the mat and the hat",
    "def f(x):  return  x",
    "a <tool> call </tool> and more of the <tool> text",
)
OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 400,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "character_coverage": 1.0,
    "minloglevel": 2,
    "hard_vocab_limit": False,
}
TEXT = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=("Cs", "Cn"))),
        st.text(" atheo<>", max_size=20),
        st.sampled_from(("<tool>", "</tool>", "<tool", "the", " and", "  ", "\u2581")),
    )
).map("".join)


def train(folder: Path, **options: Any) -> Path:
    """Train a tiny model; returns the folder that holds it as tokenizer.model."""
    folder.mkdir(exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_prefix=str(folder / "tokenizer"),
        **{**OPTIONS, **options},
    )
    return folder


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"add_dummy_prefix": False},
        {"user_defined_symbols": ["<tool>", "</tool>", "<to"]},
        {"user_defined_symbols": ["<tool>", "▁▁"], "add_dummy_prefix": False},
        {"byte_fallback": False},
    ],
    ids=str,
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("model"), **request.param)


@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_ids_of_any_text_are_those_of_sentencepiece(trained: Path, text: str) -> None:
    tokenizer = _once(trained)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(trained / "tokenizer.model"))
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    if "\u2047" not in reference.decode(ids):  # an unknown character is lost
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "unigram", "vocab_size": 300}, "it is not a BPE model"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalises texts"),
        ({"remove_extra_whitespaces": True}, "it removes white space"),
        ({"treat_whitespace_as_suffix": True}, "white space ends its words"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = train(tmp_path, **options)
    with pytest.raises(CheckpointError, match=rf"exactly \({reason}\): let transformers write"):
        tokenizers.auto(folder)


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_cut_off_file_is_refused(cut: int, tmp_path: Path) -> None:
    path = train(tmp_path) / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"is no sentencepiece model|cannot be read exactly"):
        tokenizers.auto(tmp_path)


def test_not_legacy_puts_a_space_only_before_the_whole_text(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    file = published_file("mistral_common/data/mistral_instruct_tokenizer_240323.model.v3")
    (tmp_path / "tokenizer.model").write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizers.auto(tmp_path)
    for text in ("a b", " a", "<s>a</s> b", "<s>[INST] hi[/INST] yes</s>", "[INST]x", "\n"):
        ids = ours.encode(text, allow_special=True)
        assert ids == theirs.encode(text, add_special_tokens=False), text
    config["legacy"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    each = tokenizers.auto(tmp_path)
    assert each.encode("<s>a", allow_special=True) == [1, *each.encode("a")]
    assert ours.encode("<s>a", allow_special=True) != [1, *ours.encode("a")]


def test_tokens_of_the_json_files_come_beside_the_pieces(tmp_path: Path) -> None:
    folder = train(tmp_path)
    size = tokenizers.auto(folder).vocab_size
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size + 7}))
    decoder = {
        "2": {"content": "</end>", "special": True},
        str(size): {"content": "<think>", "special": False},
    }
    config = {"added_tokens_decoder": decoder, "eos_token": "</end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.auto(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (size + 8, 2)
    assert tokenizer.token_id("<|im_end|>") == size + 7
    assert size in tokenizer.encode("a<think>b")
    assert size + 7 not in tokenizer.encode("a<|im_end|>b")


def test_the_path_of_a_file_is_read_though_the_folder_holds_another(
    tmp_path: Path, write_tokenizer: Callable[..., Path]
) -> None:
    """As `original/tokenizer.model` or `tokenizer.model.v3` is named."""
    folder = train(write_tokenizer(tmp_path))
    file = (folder / "tokenizer.model").rename(folder / "tokenizer.model.v3")
    assert tokenizers.auto(folder).source.name == "tokenizer.json"
    tokenizer = tokenizers.auto("unused", path=str(file))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
    assert tokenizer.encode("the cat sat") == reference.encode("the cat sat")
    assert tokenizer.eos_id == reference.eos_id()


_tokenizers: dict[Path, tokenizers.Tokenizer] = {}


def _once(folder: Path) -> tokenizers.Tokenizer:
    if folder not in _tokenizers:
        _tokenizers[folder] = tokenizers.auto(folder)
    return _tokenizers[folder]
