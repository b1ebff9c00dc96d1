"""`trainable` leaves the named parameters trainable, by whole components of their names."""

import pytest
import torch

from solotune.errors import ConfigError
from solotune.models import Decoder
from solotune.optim import decay_groups
from solotune.training import freeze
from tests.models.tiny import tiny


def model(layers: int = 12) -> Decoder:
    return tiny(num_hidden_layers=layers, hidden_size=8, intermediate_size=8, vocab_size=16)


def trained(decoder: Decoder) -> list[str]:
    return [name for name, p in decoder.named_parameters() if p.requires_grad]


def test_a_pattern_matches_whole_components_of_names() -> None:
    decoder = model()
    freeze(decoder, trainable="layers.1")
    assert {name.split(".")[1] for name in trained(decoder)} == {"1"}
    freeze(decoder, trainable="norm")
    assert trained(decoder) == ["norm.weight"]
    freeze(decoder, trainable="layers.(1[01]|9)|lm_head")
    assert {".".join(name.split(".")[:2]) for name in trained(decoder)} == {
        "layers.9", "layers.10", "layers.11", "lm_head.weight"
    }  # fmt: skip
    freeze(decoder, trainable="q_proj")
    assert len(trained(decoder)) == 12


def test_without_a_pattern_all_is_trained() -> None:
    decoder = model(2)
    freeze(decoder, trainable=None)
    assert trained(decoder) == [name for name, _ in decoder.named_parameters()]


@pytest.mark.parametrize("pattern", ["layer.3", "blocks", "q_pro", "layers.99"])
def test_a_pattern_without_a_match_is_refused_with_names_as_they_are(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"matches no parameter: names are like .*weight"):
        freeze(model(2), trainable=pattern)


def test_a_broken_pattern_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="not a regular expression"):
        freeze(model(2), trainable="layers.(1")


def test_only_what_is_trained_reaches_the_optimizer() -> None:
    decoder = model(2)
    freeze(decoder, trainable="layers.1")
    groups = decay_groups(decoder)
    count = sum(p.numel() for group in groups for p in group["params"])
    assert count == sum(p.numel() for p in decoder.layers[1].parameters())
    assert torch.optim.AdamW(groups)
