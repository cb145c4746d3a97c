"""int8 loses what rounding its inputs to 255 steps loses, and nothing more.

Inputs are like those inside a model: tokens of very different size, a few loud channels. Each
operation is held against float64 twice: against exact integer arithmetic on the rounded inputs,
where one rounding of the result is all that may be lost; and against the product of the inputs
themselves, where its error may not be above that of the rounding alone.
"""

import pytest
import torch

from tokenfleet.kernels import backend as backend_module
from tokenfleet.kernels.activation import gelu_tanh_mul, silu_mul
from tokenfleet.kernels.gated import gated_linear
from tokenfleet.kernels.linear import linear, pack_linear, quantize_rows

HALF_A_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = pytest.mark.parametrize("dtype", list(HALF_A_STEP), ids=str)
ROWS = pytest.mark.parametrize("rows", [1, 7, 32, 33, 150])
GATES = {
    silu_mul: torch.nn.functional.silu,
    gelu_tanh_mul: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def inputs(rows, width, outputs, dtype):
    rng = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, width, generator=rng) * torch.randn(rows, 1, generator=rng).exp()
    x[:, ::37] *= 15.0
    weight = torch.randn(outputs, width, generator=rng) / width**0.5
    return x.to(dtype), weight.to(dtype)


def on_rounded_inputs(x, weight):
    (values, scale), (weights, per_output) = quantize_rows(x), quantize_rows(weight)
    return (
        (values.double() @ weights.double().t())
        * scale.double()[:, None]
        * per_output.double()
    )  # fmt: skip


def lost(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


def bound(expected, dtype, least):
    """One rounding to dtype, after fp32 arithmetic on terms of size `least` and more."""
    return 1.01 * HALF_A_STEP[dtype] * expected.abs() + 4e-6 * least + 1e-7


@pytest.mark.usefixtures("backend")
@ROWS
@DTYPES
def test_a_product_is_rounded_once(rows, dtype):
    x, weight = inputs(rows, 576, 123, dtype)
    out = linear(x, pack_linear(weight, quantization="int8"))
    expected, exact = on_rounded_inputs(x, weight), x.double() @ weight.double().t()
    assert ((out.double() - expected).abs() <= bound(expected, dtype, expected.abs())).all()
    assert lost(out, exact) <= 1.01 * lost(expected, exact) + HALF_A_STEP[dtype]


@ROWS
@DTYPES
@pytest.mark.parametrize("gate", list(GATES))
def test_a_gated_product_is_rounded_once_or_is_its_two_operations(rows, dtype, gate):
    x, weight = inputs(rows, 576, 2 * 96, dtype)
    with backend_module.using("cpp"):
        packed = pack_linear(weight, quantization="int8")
        out = gated_linear(x, packed, gate)
        apart = gate(linear(x, packed))
    wide, exact = on_rounded_inputs(x, weight), x.double() @ weight.double().t()
    one, two = (GATES[gate](y[:, :96]) * y[:, 96:] for y in (wide, exact))
    size = (wide[:, :96].abs() + 1.0) * wide[:, 96:].abs()
    in_one_pass = ((out.double() - one).abs() <= bound(one, dtype, size)).all()
    assert in_one_pass or torch.equal(out, apart)
    assert lost(out, two) <= 1.01 * lost(one, two) + 3 * HALF_A_STEP[dtype]


@pytest.mark.parametrize("dtype", list(HALF_A_STEP), ids=str)
@pytest.mark.usefixtures("backend")
def test_no_input_is_rounded_by_more_than_half_a_step(dtype):
    x, weight = inputs(40, 576, 64, dtype)
    eye = torch.eye(576)[:64].to(dtype) * 127.0  # int8 holds it exactly
    out = linear(x.float(), pack_linear(eye.float(), quantization="int8")) / 127.0
    step = x.float().abs().amax(1, keepdim=True) / 127.0
    assert ((out - x[:, :64].float()).abs() <= 0.5001 * step).all()
    held = pack_linear(weight, quantization="int8").scale
    torch.testing.assert_close(held, weight.float().abs().amax(1) / 127.0, rtol=1e-6, atol=0)
