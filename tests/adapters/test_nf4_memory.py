"""What loading in 4 bits takes: the quantised model and one tensor, on the host and on a card."""

from pathlib import Path
from typing import Any

import pytest
import torch

from solotune.adapters import four_bit_linears, quantize_linears
from solotune.adapters.nf4_product import check_works
from solotune.checkpoint import load_weights
from solotune.models import Decoder, auto
from solotune.training import set_dtype
from tests.memory.allocations import allocated

from .four_bit_model import load, write_folder

SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}


def on_meta(folder: Path) -> Decoder:
    with torch.device("meta"):
        model = auto(folder)
    quantize_linears(set_dtype(model, torch.bfloat16))
    return model


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_loading_needs_the_quantised_model_and_one_tensor(
    tmp_path: Path, stored: torch.dtype
) -> None:
    """Every byte that the allocator hands out counts; blocks in bf16 would be 3.9 times that."""
    folder = write_folder(tmp_path / "model", dtype=stored, **SIZES)
    model = on_meta(folder)
    check_works(torch.device("cpu"))  # bitsandbytes keeps some tables from its first use on
    measured = allocated(lambda: load_weights(model, folder, device="cpu"))
    num_bytes = sum(p.nbytes for p in model.parameters())
    in_bf16 = 2 * sum(layer.layout.num_numbers for layer in four_bit_linears(model).values())
    assert num_bytes < in_bf16 / 3
    assert measured.left == pytest.approx(num_bytes, rel=0.001)
    one_tensor = 512 * 1536 * stored.itemsize
    scales_in_fp32 = 4 * 512 * 1536 // 64
    temporaries = 2 * 2**20  # 20 bytes of each number that is quantised at once
    assert measured.peak < num_bytes + one_tensor + scales_in_fp32 + temporaries


@pytest.mark.gpu
def test_on_a_card_loading_needs_the_quantised_model_and_one_tensor(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", dtype=torch.bfloat16, **SIZES)
    model = on_meta(folder)
    device = torch.device("cuda")
    check_works(device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    load_weights(model, folder, device=device)
    num_bytes = sum(p.nbytes for p in model.parameters())
    one_tensor = 512 * 1536 * 2
    pieces = 8 * 2**20
    assert torch.cuda.memory_allocated() - before < 1.02 * num_bytes + 2**20
    assert torch.cuda.max_memory_allocated() - before < 1.02 * num_bytes + one_tensor + pieces


@pytest.mark.gpu
def test_a_card_gives_the_numbers_of_a_cpu(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", dtype=torch.bfloat16, **SIZES)
    on_card, here = (load(folder, dtype=torch.bfloat16, device=d)[0] for d in ("cuda", "cpu"))
    x = torch.linspace(-1, 1, 40 * 512).view(40, 512)
    for name, layer in four_bit_linears(here).items():
        other = four_bit_linears(on_card)[name]
        differing = (other.weight.cpu() != layer.weight).float().mean()
        assert differing < 1e-3, name  # numbers halfway between two values
        if layer.in_features == 512:
            found = other(x.cuda().bfloat16()).cpu().float()
            torch.testing.assert_close(found, layer(x), rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_weights_whose_home_is_the_host_are_quantised_on_the_card(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", dtype=torch.bfloat16, **SIZES)
    model, wanted = on_meta(folder), load(folder, dtype=torch.bfloat16, device="cuda")[0]
    homes = {layer.weight for layer in four_bit_linears(model).values()}
    load_weights(model, folder, device="cuda", on_host=homes)
    for name, layer in four_bit_linears(model).items():
        assert layer.weight.is_cpu
        assert torch.equal(layer.weight, wanted.get_parameter(name).cpu())
