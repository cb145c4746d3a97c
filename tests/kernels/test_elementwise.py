"""RMSNorm and the gated activations against the float64 oracle."""

import numpy as np
import pytest
import torch

from tokenfleet.kernels.activation import gelu_tanh_mul, silu_mul
from tokenfleet.kernels.linear import quantize_rows
from tokenfleet.kernels.norm import add_rms_norm, add_rms_norm_int8, rms_norm

pytestmark = pytest.mark.usefixtures("backend")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SIZES = pytest.mark.parametrize(
    ("rows", "width"), [(1, 576), (63, 123), (123, 63), (1000, 64), (2, 1), (3, 1000)]
)


def draw(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


@DTYPES
@SIZES
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_equals_the_oracle(oracle, dtype, rows, width, offset):
    x, weight = draw((rows, width), dtype, 1), draw((width,), dtype, 2)
    out = rms_norm(x, weight, 1e-5, weight_offset=offset)
    expected = oracle.rms_norm(x.double().numpy(), weight.double().numpy(), 1e-5, offset)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@SIZES
def test_add_rms_norm_returns_the_norm_of_the_rounded_sum_and_the_sum(oracle, dtype, rows, width):
    x, residual, weight = (
        draw((rows, width), dtype, 1),
        draw((rows, width), dtype, 2),
        draw((width,), dtype, 3),
    )
    expected_sum = x + residual
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    expected = oracle.rms_norm(expected_sum.double().numpy(), weight.double().numpy(), 1e-6, 0.0)
    assert torch.equal(total, expected_sum)
    np.testing.assert_allclose(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@SIZES
def test_a_norm_in_int8_is_the_norm_rounded(dtype, rows, width):
    x, residual, weight = (
        draw((rows, width), dtype, 1),
        draw((rows, width), dtype, 2),
        draw((width,), dtype, 3),
    )
    normed, expected_sum = add_rms_norm(x, residual, weight, 1e-6, weight_offset=1.0)
    rounded, total = add_rms_norm_int8(x, residual, weight, 1e-6, weight_offset=1.0)
    values, scales = quantize_rows(normed)
    assert torch.equal(total, expected_sum)
    assert torch.equal(rounded.values[:, :width], values)
    assert torch.equal(rounded.scales, scales)
    assert rounded.values.shape == (rows, -(-width // 64) * 64)
    assert not rounded.values[:, width:].any()
    assert (rounded.shape, rounded.dtype) == ((rows, width), dtype)


def test_rms_norm_works_on_heads_of_a_fused_projection(oracle):
    fused, weight = draw((7, 9 * 32 + 5), torch.float32, 4), draw((32,), torch.float32, 5)
    heads = fused[:, : 9 * 32].view(7, 9, 32)
    out = rms_norm(heads, weight, 1e-6)
    assert out.shape == heads.shape
    expected = oracle.rms_norm(
        heads.reshape(-1, 32).double().numpy(), weight.double().numpy(), 1e-6, 0.0
    )
    np.testing.assert_allclose(out.reshape(-1, 32).double(), expected, rtol=2e-6, atol=2e-6)


def test_rms_norm_keeps_precision_at_the_ends_of_half_range():
    big = torch.full((1, 64), 6e4, dtype=torch.float16)  # squares overflow half by far
    tiny = torch.full((1, 64), 1e-6, dtype=torch.float16)
    one = torch.ones(64, dtype=torch.float16)
    assert torch.allclose(rms_norm(big, one, 1e-5).float(), torch.ones(64), atol=1e-3)
    assert rms_norm(tiny, one, 1e-5).isfinite().all()


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (63, 123), (123, 1), (1000, 63)])
@pytest.mark.parametrize(("op", "name"), [(silu_mul, "silu"), (gelu_tanh_mul, "gelu_tanh")])
def test_gated_activation_equals_the_oracle(oracle, dtype, rows, width, op, name):
    x = draw((rows, 2 * width), dtype, 6)
    out = op(x)
    wide = x.double().numpy()
    expected = np.vectorize(getattr(oracle, name))(wide[:, :width]) * wide[:, width:]
    assert out.shape == (rows, width)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("op", [silu_mul, gelu_tanh_mul])
def test_gated_activation_of_extreme_gates_is_finite(op):
    gate = torch.tensor([[-1e4, -100.0, -90.0, 0.0, 90.0, 1e4]])
    out = op(torch.cat([gate, torch.ones(1, 6)], dim=-1))
    assert torch.equal(out[0, :4].abs() < 1e-30, torch.ones(4, dtype=torch.bool))
    assert torch.equal(out[0, 4:], gate[0, 4:])
