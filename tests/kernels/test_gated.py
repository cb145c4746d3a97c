"""The gate in the product's own pass gives what the two operations give one after the other."""

import pytest
import torch

from tokenfleet.kernels import backend as backend_module
from tokenfleet.kernels import gated
from tokenfleet.kernels.activation import gelu_tanh_mul, silu_mul
from tokenfleet.kernels.gated import gated_linear
from tokenfleet.kernels.linear import PackedWeight, linear, pack_linear

GATES = pytest.mark.parametrize("gate", [silu_mul, gelu_tanh_mul])
QUANTIZATIONS = pytest.mark.parametrize("quantization", [None, "int8"])


def draw(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack(inputs: int, width: int, dtype, quantization, *, bias: bool) -> PackedWeight:
    weight = draw((2 * width, inputs), dtype, 2) / inputs**0.5
    return pack_linear(
        weight, draw((2 * width,), dtype, 3) if bias else None, quantization=quantization
    )


@pytest.mark.usefixtures("backend")
@GATES
@QUANTIZATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("inputs", "width"), [(64, 48), (576, 123), (192, 16)])
def test_it_equals_the_product_and_then_the_gate(inputs, width, dtype, quantization, gate):
    packed = pack(inputs, width, dtype, quantization, bias=width != 48)
    close = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for rows in (0, 1, 7, 16, 29, 33, 64, 100):
        x = draw((rows, inputs), dtype, 1)
        torch.testing.assert_close(
            gated_linear(x, packed, gate),
            gate(linear(x, packed).float()).to(dtype),
            rtol=close,
            atol=close,
        )


@QUANTIZATIONS
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(quantization):
    x = draw((70, 192), torch.bfloat16, 1)
    with backend_module.using("cpp"):
        packed = pack(192, 48, torch.bfloat16, quantization, bias=True)
        if not packed.packed:
            pytest.skip("this CPU has no AVX2")
        whole = gated_linear(x, packed, silu_mul)
        for begin, end in ((0, 1), (3, 5), (17, 34), (6, 70), (38, 70)):
            assert torch.equal(gated_linear(x[begin:end], packed, silu_mul), whole[begin:end])


@pytest.mark.usefixtures("backend")
@QUANTIZATIONS
def test_rows_may_have_gaps_and_a_nan_stays_in_its_own(quantization):
    wide = draw((40, 200), torch.bfloat16, 1)
    wide[5, 8] = torch.nan
    packed = pack(64, 32, torch.bfloat16, quantization, bias=False)
    out = gated_linear(wide[:, 7:71], packed, silu_mul)
    assert torch.equal(
        out.nan_to_num(), gated_linear(wide[:, 7:71].contiguous(), packed, silu_mul).nan_to_num()
    )
    assert out[5].isnan().all()
    assert out[torch.arange(40) != 5].isfinite().all()


def test_without_tiles_the_cpp_form_does_one_after_the_other(monkeypatch):
    x = draw((37, 192), torch.bfloat16, 1)
    with backend_module.using("cpp"):
        packed = pack(192, 48, torch.bfloat16, None, bias=True)
        if not packed.packed:
            pytest.skip("this CPU has no AVX2")
        call = gated._PACK
        lanes = 1  # the path of linear_layer.h
        monkeypatch.setattr(gated, "_PACK", lambda *a: call(*a[:5], lanes, *a[6:]))
        out = gated_linear(x, packed, silu_mul)
        expected = gated.reference(x, packed, silu_mul)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_an_input_of_another_width_is_refused():
    with backend_module.using("cpp"):
        packed = pack(64, 32, torch.bfloat16, None, bias=False)
        if not packed.packed:
            pytest.skip("this CPU has no AVX2")
        with pytest.raises(ValueError, match=r"\[T, 64\], got torch.bfloat16 \(3, 60\)"):
            gated_linear(torch.zeros(3, 60, dtype=torch.bfloat16), packed, silu_mul)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_extreme_gates_are_those_of_silu(dtype):
    """An identity before the gate, so what is gated is known; up is 1."""
    gates = torch.tensor([0.0, -0.0, 1e-3, -1e-3, 9.0, -9.0, 60.0, -60.0, 89.0, -89.0, 1e4, -1e4])
    x = torch.nn.functional.pad(gates[:, None].expand(12, 31), (0, 33)).to(dtype)
    x[:, 63] = 1.0
    weight = torch.zeros(64, 64)
    weight[:31, :31], weight[32:, 63] = torch.eye(31), 1.0
    with backend_module.using("cpp"):
        for quantization in (None, "int8"):
            packed = pack_linear(weight.to(dtype), quantization=quantization)
            product = linear(x, packed).float()
            out = gated_linear(x, packed, silu_mul).float()
            expected = torch.nn.functional.silu(product[:, :32].double()) * product[:, 32:]
            torch.testing.assert_close(
                out.double(), expected, rtol=2e-2, atol=max(torch.finfo(dtype).tiny, 1e-33)
            )
