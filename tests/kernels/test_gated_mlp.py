"""An MLP in one operation gives the bits of its two operations, whatever takes it."""

import pytest
import torch

from tokenfleet.kernels import backend as backend_module
from tokenfleet.kernels import gated_mlp as ops
from tokenfleet.kernels.activation import gelu_tanh_mul, silu_mul
from tokenfleet.kernels.gated_mlp import gated_mlp
from tokenfleet.kernels.linear import Int8Rows, pack_linear, quantize_rows

QUANTIZATIONS = pytest.mark.parametrize("quantization", [None, "int8"])


def draw(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack(inputs, width, outputs, dtype, quantization, *, bias=False):
    weights = draw((2 * width, inputs), dtype, 2), draw((outputs, width), dtype, 3)
    return tuple(
        pack_linear(
            weight / weight.shape[1] ** 0.5,
            draw((len(weight),), dtype, 4) if bias else None,
            quantization=quantization,
        )
        for weight in weights
    )


@pytest.mark.usefixtures("backend")
@QUANTIZATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate", [silu_mul, gelu_tanh_mul])
@pytest.mark.parametrize("width", [64, 96, 123])
def test_it_equals_its_two_operations(width, gate, dtype, quantization):
    gate_up, down = pack(192, width, 83, dtype, quantization, bias=width != 96)
    for rows in (0, 1, 16, 33, 47, 100):
        x = draw((rows, 192), dtype, 1)
        out = gated_mlp(x, gate_up, down, gate)
        assert torch.equal(out, ops.reference(x, gate_up, down, gate))
        assert (out.dtype, out.shape) == (dtype, (rows, 83))


@QUANTIZATIONS
@pytest.mark.parametrize("rows", [790, 1601])
def test_many_rows_go_through_it_in_pieces_to_the_same_bits(rows, quantization):
    x = draw((rows, 64), torch.bfloat16, 1)
    with backend_module.using("cpp"):
        gate_up, down = pack(64, 128, 48, torch.bfloat16, quantization)
        out = gated_mlp(x, gate_up, down, silu_mul)
        assert torch.equal(out, ops.reference(x, gate_up, down, silu_mul))
        for begin, end in ((0, 1), (3, 36), (100, 170), (700, rows)):
            if gate_up.packed:
                alone = gated_mlp(x[begin:end], gate_up, down, silu_mul)
                assert torch.equal(alone, out[begin:end])


@pytest.mark.usefixtures("backend")
@QUANTIZATIONS
def test_rows_may_have_gaps_and_a_nan_stays_in_its_own(quantization):
    wide = draw((70, 200), torch.bfloat16, 1)
    wide[5, 8], wide[69, 9] = torch.nan, torch.inf
    gate_up, down = pack(64, 64, 32, torch.bfloat16, quantization)
    for _ in range(2):  # what the first call left between the products is not read
        out = gated_mlp(wide[:, 7:71], gate_up, down, silu_mul)
        assert out[[5, 69]].isnan().all()
        fine = torch.tensor([row not in (5, 69) for row in range(70)])
        again = gated_mlp(wide[fine, 7:71].contiguous(), gate_up, down, silu_mul)
        assert out[fine].isfinite().all()
        assert torch.equal(out[fine], again) or not gate_up.packed


@pytest.mark.parametrize("rows", [20, 50])
def test_rows_that_are_int8_already_give_the_bits_of_those_they_were_made_from(rows):
    x = draw((rows, 100), torch.bfloat16, 1)
    with backend_module.using("cpp"):
        gate_up, down = pack(100, 64, 32, torch.bfloat16, "int8")
        if gate_up.rounding != "int8":
            pytest.skip("this CPU has no AVX2")
        values, scales = quantize_rows(x)
        rounded = Int8Rows(
            torch.nn.functional.pad(values, (0, 28)), scales, (rows, 100), torch.bfloat16
        )
        out = gated_mlp(rounded, gate_up, down, silu_mul)
        assert torch.equal(out, gated_mlp(x, gate_up, down, silu_mul))


def test_weights_that_do_not_follow_each_other_are_refused():
    with backend_module.using("cpp"):
        gate_up, _ = pack(64, 64, 32, torch.bfloat16, None)
        _, down = pack(64, 32, 32, torch.bfloat16, None)
        if not gate_up.packed:
            pytest.skip("this CPU has no AVX2")
        with pytest.raises(ValueError, match=r"\[T, 32\], got torch.bfloat16 \(3, 64\)"):
            gated_mlp(torch.zeros(3, 64, dtype=torch.bfloat16), gate_up, down, silu_mul)
