"""Linear layers: every layout gives the product of the weight it was packed from."""

import struct

import numpy as np
import pytest
import torch

from tokenfleet.kernels import backend as backend_module
from tokenfleet.kernels import linear as ops
from tokenfleet.kernels.activation import silu_mul
from tokenfleet.kernels.backend import DTYPE_CODES
from tokenfleet.kernels.gated import gated_linear
from tokenfleet.kernels.linear import linear, pack_linear

SHAPES = [(1, 64, 48), (63, 576, 123), (123, 123, 576), (5, 1536, 33), (32, 64, 64), (2, 1000, 1)]
SHAPES += [(33, 64, 16), (350, 1536, 47), (96, 32, 83)]
SIZES = pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def draw(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.usefixtures("backend")
@SIZES
@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_equals_float64(rows, inputs, outputs, dtype, with_bias):
    x, weight = draw((rows, inputs), dtype, 1), draw((outputs, inputs), dtype, 2) / inputs**0.5
    bias = draw((outputs,), dtype, 3) if with_bias else None
    packed = pack_linear(weight, bias)
    out = linear(x, packed)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert out.dtype == dtype
    assert (packed.out_features, packed.in_features, packed.dtype) == (outputs, inputs, dtype)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    np.testing.assert_allclose(out.double(), expected, **close)
    np.testing.assert_allclose(ops.reference(x, weight, bias).double(), expected, **close)


@pytest.mark.usefixtures("backend")
@SIZES
@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_sums_are_exact(rows, inputs, outputs, dtype, with_bias):
    x, weight = draw((rows, inputs), dtype, 1), draw((outputs, inputs), dtype, 2)
    bias = draw((outputs,), dtype, 3) if with_bias else None
    out = linear(x, pack_linear(weight, bias, quantization="int8"))
    values, scale = ops.quantize_rows(weight)
    rounded, token_scale = ops.quantize_rows(x)
    expected = (
        (rounded.double() @ values.double().t()) * scale.double() * token_scale.double()[:, None]
    )
    expected += 0 if bias is None else bias.double()
    close = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    bound = close * expected.abs().clamp_min(1.0)
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.usefixtures("backend")
def test_int8_is_within_two_percent_of_the_exact_product():
    x, weight = draw((200, 576), torch.float32, 1), draw((300, 576), torch.float32, 2)
    exact = x @ weight.t()
    error = linear(x, pack_linear(weight, quantization="int8")) - exact
    assert error.norm() / exact.norm() < 0.02


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("quantization", [None, "int8"])
@DTYPES
def test_a_row_does_not_depend_on_its_neighbours_values(quantization, dtype):
    x = draw((40, 64), dtype, 1)
    packed = pack_linear(draw((48, 64), dtype, 2), quantization=quantization)
    other = x.clone()
    other[:17], other[18:] = 100.0, -3.0
    assert torch.equal(linear(x, packed)[17], linear(other, packed)[17])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_nan_stays_in_its_own_row(quantization):
    x = draw((33, 64), torch.bfloat16, 1)
    packed = pack_linear(draw((48, 64), torch.bfloat16, 2), quantization=quantization)
    x[5, 7] = torch.nan
    out = linear(x, packed)
    assert out[5].isnan().all()
    assert out[torch.arange(33) != 5].isfinite().all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("quantization", [None, "int8"])
@DTYPES
def test_rows_may_be_strided_and_none(quantization, dtype):
    wide = draw((9, 200), dtype, 1)
    packed = pack_linear(draw((48, 64), dtype, 2), quantization=quantization)
    assert torch.equal(linear(wide[:, 7:71], packed), linear(wide[:, 7:71].contiguous(), packed))
    assert linear(wide[:0, :64], packed).shape == (0, 48)


@pytest.mark.usefixtures("backend")
def test_a_row_of_zeros_gives_the_bias():
    bias = draw((48,), torch.float32, 3)
    packed = pack_linear(draw((48, 64), torch.float32, 2), bias, quantization="int8")
    assert torch.equal(linear(torch.zeros(2, 64), packed), bias.expand(2, 48))


@pytest.mark.parametrize("path", [0, 1, 2], ids=["fastest", "lanes", "wide"])
@pytest.mark.parametrize("rows", [1, 5, 37, 64])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_both_instruction_sets_give_what_torch_gives(quantization, rows, path):
    x, weight = draw((rows, 192), torch.bfloat16, 1), draw((83, 192), torch.bfloat16, 2)
    with backend_module.using("cpp"):
        packed = pack_linear(weight, quantization=quantization)
        if not packed.packed:
            pytest.skip("this CPU has no AVX2")
        library = backend_module.backend.library
        function = library.tf_linear_int8 if quantization else library.tf_linear_bf16
        out = torch.full((rows, 83), torch.nan, dtype=torch.bfloat16)
        call = struct.pack("@2P4qP", x.data_ptr(), out.data_ptr(), 192, rows, 1, path, 0)
        function(packed.packed + call)
    if quantization:
        assert torch.equal(out, ops.int8_reference(x, *ops.quantize_rows(weight)))
    else:
        close = {"rtol": 1e-2, "atol": 1e-2}
        np.testing.assert_allclose(out.double(), x.double() @ weight.double().t(), **close)


@pytest.mark.parametrize("path", [0, 1, 2], ids=["fastest", "lanes", "wide"])
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_where_only_weights_are_rounded_inputs_lose_next_to_nothing(dtype, rows, path):
    x, weight = draw((rows, 200), dtype, 1), draw((83, 200), dtype, 2)
    x[:, 3] *= 30.0
    x[rows // 2] = 0.0
    bias = draw((83,), dtype, 3)
    with backend_module.using("cpp"):
        packed = pack_linear(weight, bias, quantization="int8_weights")
        if not packed.packed:
            pytest.skip("this CPU has no AVX2")
        out = torch.full((rows, 83), torch.nan, dtype=dtype)
        code = DTYPE_CODES[dtype]
        call = struct.pack("@2P4qP", x.data_ptr(), out.data_ptr(), 200, rows, code, path, 0)
        backend_module.backend.library.tf_linear_two_bytes(packed.packed + call)
        assert path or torch.equal(linear(x, packed), out)
    values, scale = ops.quantize_rows(weight)
    wide = ops.two_bytes_reference(x.float(), values, scale, bias.float())
    lost = 2.0**-16 * x.abs().amax(1, keepdim=True).float() * values.float().abs().sum(1) * scale
    one_rounding = torch.finfo(dtype).eps * 0.505 * wide.abs()
    assert ((out.float() - wide).abs() <= one_rounding + lost + 1e-6).all()


def test_weights_of_32_bits_are_kept_where_only_weights_may_be_rounded():
    weight = draw((48, 64), torch.float32, 2)
    assert pack_linear(weight, quantization="int8_weights").scale is None


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (63, 123), (5, 576), (3, 95), (2, 160)])
def test_weights_are_rounded_alike_by_every_backend(shape, dtype):
    weight = draw(shape, dtype, 1)
    weight[0] = 0.0
    with backend_module.using("reference"):
        plain = pack_linear(weight, quantization="int8")
    with backend_module.using("cpp"):
        packed = pack_linear(weight, quantization="int8")
    assert torch.equal(plain.scale, packed.scale)
    if packed.layout == "int8 blocks":
        assert torch.equal(ops.to_blocks(plain.data), packed.data)
    else:
        assert torch.equal(plain.data, packed.data)


@pytest.mark.parametrize("outputs", [600, 41])
@pytest.mark.parametrize("quantization", [None, "int8", "int8_weights"])
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(quantization, outputs):
    x, bias = draw((370, 1536), torch.bfloat16, 1), draw((outputs,), torch.bfloat16, 3)
    with backend_module.using("cpp"):
        weight = draw((outputs, 1536), torch.bfloat16, 2)
        packed = pack_linear(weight, bias, quantization=quantization)
        if not packed.packed:
            pytest.skip("this CPU has no AVX2")
        whole = linear(x, packed)
        for begin, end in ((0, 1), (3, 5), (17, 34), (6, 70), (300, 332), (311, 370)):
            assert torch.equal(linear(x[begin:end], packed), whole[begin:end])


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("inputs", [192, 100])
def test_rows_that_are_int8_already_give_the_bits_of_those_they_were_made_from(rows, inputs):
    x, weight = draw((rows, inputs), torch.bfloat16, 1), draw((64, inputs), torch.bfloat16, 2)
    with backend_module.using("cpp"):
        packed = pack_linear(weight, quantization="int8")
        if packed.rounding != "int8":
            pytest.skip("this CPU has no AVX2")
        values, scales = ops.quantize_rows(x)
        padded = torch.nn.functional.pad(values, (0, -inputs % 64))
        rounded = ops.Int8Rows(padded, scales, (rows, inputs), x.dtype)
        assert torch.equal(linear(rounded, packed), linear(x, packed))
        assert torch.equal(
            gated_linear(rounded, packed, silu_mul), gated_linear(x, packed, silu_mul)
        )


def test_rows_in_int8_are_refused_by_any_other_weight():
    rounded = ops.Int8Rows(torch.zeros(2, 64).char(), torch.ones(2), (2, 64), torch.float32)
    with pytest.raises(TypeError, match="pass x as it was"):
        linear(rounded, pack_linear(torch.zeros(8, 64)))


def test_unknown_quantization_is_refused_by_name():
    with pytest.raises(ValueError, match="int8_weights, got 'int4'"):
        pack_linear(torch.zeros(4, 4), quantization="int4")


def test_int8_weights_take_a_quarter_of_fp32():
    weight = draw((512, 512), torch.float32, 1)
    ratio = pack_linear(weight, quantization="int8").num_bytes / pack_linear(weight).num_bytes
    assert 0.25 <= ratio < 0.26
