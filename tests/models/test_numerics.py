"""Angles, norm statistics and one-dimensional parameters are fp32 whatever dtype the weights have.

Shapes: S tokens, H heads, K head width, D width.
"""

import torch

from solotune.models.norm import RMSNorm
from solotune.models.rope import Rotary, rotate
from solotune.training import set_dtype

from .tiny import tiny

HALF_STEP = 2.0**-8  # the largest relative error of one rounding to bf16


def test_positions_beyond_256_keep_their_own_angles_in_a_bf16_model() -> None:
    # bf16 holds every integer up to 256 only: 257 would turn like 256.
    model = set_dtype(tiny(), torch.bfloat16)
    positions_S = torch.arange(250, 2000)
    context = model.context(positions_S.unsqueeze(0), None)
    cos_BSP, sin_BSP, _ = context.angles[0]
    assert cos_BSP.dtype == sin_BSP.dtype == torch.float32
    exact_S = positions_S.double()  # the fastest pair turns by one radian a position
    torch.testing.assert_close(cos_BSP[0, :, 0].double(), exact_S.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin_BSP[0, :, 0].double(), exact_S.sin(), atol=1e-6, rtol=0)


def test_a_bf16_query_is_turned_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(0)
    positions_S = torch.arange(300, 364)
    rotary = Rotary(16, {"rope_type": "default", "rope_theta": 10000.0})
    x_SHK = torch.randn(64, 4, 16).bfloat16()
    turned_SHK = rotate(x_SHK.unsqueeze(0), *rotary(positions_S.unsqueeze(0))[:2])[0]
    assert turned_SHK.dtype == torch.bfloat16

    frequency_K = 10000.0 ** -(torch.arange(0, 16, 2).double() / 16)
    angle_S1K = positions_S.double().outer(frequency_K).unsqueeze(1)
    a, b = x_SHK.double().chunk(2, -1)
    exact_SHK = torch.cat(
        (a * angle_S1K.cos() - b * angle_S1K.sin(), b * angle_S1K.cos() + a * angle_S1K.sin()), -1
    )
    error_SHK = (turned_SHK.double() - exact_SHK).abs()
    assert (error_SHK <= HALF_STEP * exact_SHK.abs() + 1e-4).all()


def test_rms_norm_of_a_bf16_row_is_the_fp32_value_rounded_once() -> None:
    # Summed in bf16, 4096 squares stall far below their sum.
    torch.manual_seed(0)
    norm = RMSNorm(4096, eps=1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x_SD = (3 * torch.randn(8, 4096)).bfloat16()
    y_SD = norm(x_SD)
    assert y_SD.dtype == torch.bfloat16
    exact_SD = x_SD.double()
    exact_SD = exact_SD / (exact_SD.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact_SD = exact_SD * norm.weight.double()
    assert ((y_SD.double() - exact_SD).abs() <= 1.0001 * HALF_STEP * exact_SD.abs()).all()


def test_a_bf16_model_keeps_norms_and_biases_in_fp32() -> None:
    model = set_dtype(tiny(attention_bias=True, mlp_bias=True), torch.bfloat16)
    for name, parameter in model.named_parameters():
        wanted = torch.float32 if parameter.dim() == 1 else torch.bfloat16
        assert parameter.dtype == wanted, name
