"""Norms, gated activations and their rounding to FP8: Triton against oracle and reference."""

import numpy as np
import pytest
import torch

from tokenfleet.kernels import activation, fp8, norm
from tokenfleet.kernels.backend import using
from tokenfleet.kernels.fp8 import BLOCK, Fp8Scales

pytestmark = [
    pytest.mark.usefixtures("triton_kernels"),
    # numpy, which interprets, warns of the infinities that are meant
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
]

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SIZES = pytest.mark.parametrize(("rows", "width"), [(1, 1), (2, 123), (1, 4100)])
KINDS = pytest.mark.parametrize("kind", ["token", "group", "static"])


def draw(shape, dtype, seed, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return x.to(dtype).to(device)


def scales_for(kind, width, device):
    given = torch.tensor([0.013], device=device) if kind == "static" else None
    if kind == "group":
        shape = (1, -(-width // BLOCK))
        return Fp8Scales(torch.ones(shape, device=device), BLOCK, BLOCK, "group")
    return Fp8Scales(torch.ones((1, 1), device=device), 1, width, kind, given)


def close(actual, expected, dtype):
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual.double().cpu(), expected, **tolerance)


def wide(x):
    return x.double().cpu().numpy()


@DTYPES
@SIZES
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_equals_the_oracle(oracle, device, dtype, rows, width, offset):
    x, weight = draw((rows, width), dtype, 1, device), draw((width,), dtype, 2, device)
    out = norm.rms_norm(x, weight, 1e-5, weight_offset=offset)
    close(out, oracle.rms_norm(wide(x), wide(weight), 1e-5, offset), dtype)


@DTYPES
@SIZES
def test_add_rms_norm_is_the_norm_of_the_rounded_sum(oracle, device, dtype, rows, width):
    x, residual, weight = (draw((rows, width), dtype, s, device) for s in (1, 2, 3))
    weight = weight[0].contiguous()
    out, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    close(out, oracle.rms_norm(wide(total), wide(weight), 1e-6, 0.0), dtype)


def test_rms_norm_works_on_heads_of_a_fused_projection(oracle, device):
    fused = draw((7, 9 * 32 + 5), torch.float32, 4, device)
    weight, heads = draw((32,), torch.float32, 5, device), fused[:, : 9 * 32].view(7, 9, 32)
    out = norm.rms_norm(heads, weight, 1e-6)
    assert out.shape == heads.shape
    expected = oracle.rms_norm(wide(heads.reshape(-1, 32)), wide(weight), 1e-6, 0.0)
    close(out.reshape(-1, 32), expected, torch.float32)


@DTYPES
@SIZES
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gated_activation_equals_the_oracle(oracle, device, dtype, rows, width, name):
    x = draw((rows, 2 * width + 3), dtype, 6, device)[:, : 2 * width]  # rows with a gap
    out = getattr(activation, f"{name}_mul")(x)
    gate, up = np.split(wide(x), 2, axis=1)
    close(out, np.vectorize(getattr(oracle, name))(gate) * up, dtype)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_no_rows_are_no_error(device, rows):
    x, weight = draw((rows, 64), torch.float32, 1, device), torch.ones(64, device=device)
    assert norm.rms_norm(x, weight, 1e-6).shape == (rows, 64)
    assert activation.silu_mul(x).shape == (rows, 32)
    assert fp8.quantize_inputs(x, scales_for("group", 64, device)).codes.shape == (rows, 64)


@pytest.mark.parametrize("kind", ["token", "group", "blocks"])
def test_the_specification_divides_by_no_number(kind, monkeypatch):
    """On CUDA torch multiplies by a number's reciprocal instead, and a scale is off by a bit."""
    divisors, divide = [], torch.Tensor.__truediv__
    monkeypatch.setattr(
        torch.Tensor, "__truediv__", lambda x, by: divisors.append(by) or divide(x, by)
    )
    x = torch.randn(3, 200)
    if kind == "blocks":
        fp8.quantize_weight(x, "blocks")
    else:
        fp8.quantize_reference(x, scales_for(kind, 200, torch.device("cpu")))
    assert divisors
    assert all(isinstance(one, torch.Tensor) for one in divisors)


def assert_same_codes(made, expected):
    assert torch.equal(made.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(made.scale, expected.scale)
    assert made.dtype == expected.dtype


@DTYPES
@SIZES
@KINDS
def test_rounding_to_fp8_is_the_references_to_the_bit(device, dtype, rows, width, kind):
    x, scales = draw((rows, width), dtype, 7, device), scales_for(kind, width, device)
    x[0] = 0.0
    assert_same_codes(fp8.quantize_inputs(x, scales), fp8.quantize_reference(x, scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@SIZES
@KINDS
def test_a_fused_rounding_is_that_of_the_result(device, dtype, rows, width, kind):
    scales = scales_for(kind, width, device)
    x, residual = draw((rows, width), dtype, 1, device), draw((rows, width), dtype, 2, device)
    weight = draw((width,), dtype, 3, device)
    made, total = norm.add_rms_norm_fp8(x, residual, weight, 1e-6, scales, weight_offset=1.0)
    normed, expected_total = norm.add_rms_norm(x, residual, weight, 1e-6, weight_offset=1.0)
    assert torch.equal(total, expected_total)
    assert_same_codes(made, fp8.quantize_reference(normed, scales))
    alone = norm.rms_norm_fp8(x, weight, 1e-6, scales)
    assert_same_codes(alone, fp8.quantize_reference(norm.rms_norm(x, weight, 1e-6), scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@KINDS
@pytest.mark.parametrize(("rows", "width"), [(2, 63), (1, 1100)])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_a_gated_activation_is_rounded_as_it_is_alone(device, dtype, rows, width, kind, name):
    x, scales = draw((rows, 2 * width), dtype, 6, device), scales_for(kind, width, device)
    made = getattr(activation, f"{name}_fp8")(x, scales)
    alone = getattr(activation, name)(x)
    assert_same_codes(made, fp8.quantize_reference(alone, scales))


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_stays_in_its_row(device, kind, bad):
    x, scales = draw((3, 200), torch.bfloat16, 8, device), scales_for(kind, 200, device)
    x[1, 70] = bad
    values = fp8.quantize_inputs(x, scales).wide()
    expected = fp8.quantize_reference(x, scales).wide()
    assert torch.equal(values[[0, 2]], expected[[0, 2]])
    assert not values[1, 70].isfinite() or (kind == "static" and bad == float("inf"))


@KINDS
def test_without_triton_the_fused_forms_are_the_operations_one_by_one(kind):
    scales = scales_for(kind, 64, torch.device("cpu"))
    x, weight = draw((3, 64), torch.bfloat16, 1, "cpu"), torch.ones(64, dtype=torch.bfloat16)
    with using("reference"):
        made, _ = norm.add_rms_norm_fp8(x, x, weight, 1e-6, scales)
        assert_same_codes(
            made, fp8.quantize_reference(norm.add_rms_norm(x, x, weight, 1e-6)[0], scales)
        )
        gated = activation.silu_mul_fp8(x.repeat(1, 2), scales)
        assert_same_codes(
            gated, fp8.quantize_reference(activation.silu_mul(x.repeat(1, 2)), scales)
        )
