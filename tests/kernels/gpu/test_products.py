"""Products in Triton: FP8 in every form and 16 bits of few rows, against float64."""

from dataclasses import replace

import pytest
import torch

from tokenfleet.kernels import fp8
from tokenfleet.kernels.fp8 import Fp8Scales
from tokenfleet.kernels.gpu import linear as gpu
from tokenfleet.kernels.gpu.launch import TARGETS, recording
from tokenfleet.kernels.linear import linear, pack_fp8, pack_linear

pytestmark = pytest.mark.usefixtures("triton_kernels")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CODES_ON_GPU = 5e-3
"""Of products of codes: Hopper's tensor cores sum them in fewer bits than fp32 has."""
# rows, inputs, outputs: tiles of 16, 32, 64 and 128 rows; inputs that fill tiles and that do not
# and, at the end, those that torch multiplies on a GPU
WHOLE = [(1, 128, 16), (5, 64, 32)]
SIZES = [(1, 63, 33), (17, 256, 70), (63, 123, 5), (70, 1, 64)]


def draw(shape, dtype, seed, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def close(out, expected, dtype, *, codes=False):
    assert out.dtype == dtype
    tolerance = max(TOLERANCE[dtype], CODES_ON_GPU if codes and out.is_cuda else 0.0)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def packed(form, outputs, inputs, dtype, device, *, bias=True):
    """A weight in one of the forms, at the scale of a model's."""
    weight = draw((outputs, inputs), dtype, 2, device) / inputs**0.5
    bias = draw((outputs,), dtype, 3, device) if bias else None
    whole = pack_linear(weight, bias, quantization="fp8_block" if "block" in form else "fp8")
    scales = whole.fp8
    if form == "static":
        scales = replace(scales, activations="static", input=torch.tensor([0.01], device=device))
    if form == "weights only":
        scales = replace(scales, activations="none")
    if form == "blocks of one row":  # what a fused projection of odd parts has
        spread = scales.weight.repeat_interleave(128, 0)[:outputs].contiguous()
        scales = replace(scales, weight=spread, rows=1)
    if form == "block static":
        scales = replace(scales, activations="static", input=torch.tensor([0.01], device=device))
    if form == "block weights only":
        scales = replace(scales, activations="none")
    return pack_fp8(whole.data, scales, bias, dtype=dtype)


def expected_of(x, weight):
    inputs = fp8.rounded_inputs(x, weight.fp8).double()
    out = inputs @ fp8.dequantize(weight.data, weight.fp8).double().t()
    return out if weight.bias is None else out + weight.bias.double()


FORMS = ["rows", "block", "static", "weights only", "blocks of one row"]


@pytest.mark.parametrize(
    ("form", "rows", "inputs", "outputs"),
    [
        *(("block", *size) for size in SIZES),
        *((form, *SIZES[i % len(SIZES)]) for i, form in enumerate(FORMS)),
        *((form, *size) for form in ("rows", "static") for size in WHOLE),
    ],
)
def test_products_in_fp8_equal_float64(device, form, rows, inputs, outputs):
    weight = packed(form, outputs, inputs, torch.bfloat16, device)
    x = draw((rows, inputs), torch.bfloat16, 1, device)
    close(linear(x, weight), expected_of(x, weight), torch.bfloat16)


@pytest.mark.parametrize("form", [*FORMS, "block static", "block weights only"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_in_fp8_take_every_dtype(device, form, dtype):
    weight = packed(form, 20, 300, dtype, device, bias=dtype == torch.float32)
    x = draw((5, 310), dtype, 1, device)[:, 7:307]  # rows with a gap
    codes = weight.rounding is not None
    close(linear(x, weight), expected_of(x, weight), dtype, codes=codes)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("form", ["block", "rows"])
def test_a_sum_may_be_split_among_programs(device, monkeypatch, form, splits):
    monkeypatch.setattr(gpu, "pick_splits", lambda *_: splits)
    weight = packed(form, 20, 700, torch.bfloat16, device)
    x = draw((3, 700), torch.bfloat16, 1, device)
    close(linear(x, weight), expected_of(x, weight), torch.bfloat16)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1000, 40), (33, 128, 65)])
def test_a_product_of_few_rows_equals_float64(device, dtype, rows, inputs, outputs):
    x, weight = draw((rows, inputs), dtype, 1, device), draw((outputs, inputs), dtype, 2, device)
    weight, bias = weight / inputs**0.5, draw((outputs,), dtype, 3, device)
    expected = x.double() @ weight.double().t() + bias.double()
    close(gpu.product(x, weight, None, bias), expected, dtype)


def test_rows_that_are_rounded_already_are_not_rounded_again(device):
    weight = packed("block", 20, 300, torch.bfloat16, device)
    x = draw((5, 300), torch.bfloat16, 1, device)
    rounded = fp8.quantize_inputs(x, weight.fp8)
    assert torch.equal(linear(rounded, weight), linear(x, weight))
    with pytest.raises(TypeError, match="layout"):
        linear(rounded, pack_linear(x))


@pytest.mark.parametrize("form", ["block", "rows", "weights only"])
def test_a_nan_stays_in_its_own_row(device, form):
    weight = packed(form, 20, 300, torch.bfloat16, device)
    x = draw((5, 300), torch.bfloat16, 1, device)
    x[2, 7] = torch.nan
    out = linear(x, weight)
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("form", ["block", "rows", "weights only"])
def test_no_rows_give_no_rows(device, form):
    weight = packed(form, 20, 300, torch.bfloat16, device)
    assert linear(torch.zeros((0, 300), dtype=torch.bfloat16, device=device), weight).shape == (
        0,
        20,
    )


@pytest.mark.parametrize(("arch", "operands"), [(80, "u8"), (90, "fp8e4nv"), (100, "fp8e4nv")])
def test_codes_are_bytes_where_the_generation_has_no_fp8(arch, operands):
    scales = Fp8Scales(torch.ones((64, 1), device="meta"), 1, 256, "token")
    codes = torch.empty((64, 256), dtype=torch.float8_e4m3fn, device="meta")
    x = torch.empty((4, 256), dtype=torch.bfloat16, device="meta")
    with recording(TARGETS[arch]) as launches:
        gpu.fp8_linear(x, codes, scales, None)
    multiply = next(launch for launch in launches if launch.name == "_product")
    assert multiply.signature["x"] == multiply.signature["weight"] == f"*{operands}"


@pytest.mark.parametrize("works", [True, False])
def test_torch_is_asked_once_whether_it_has_the_product_and_is_not_relied_on(
    works, monkeypatch, caplog
):
    asked = []

    def product(x, _codes, x_scale, w_scale, bias, out_dtype):
        asked.append((x.shape[0], bias is not None, out_dtype))
        assert (x_scale.shape, w_scale.shape) == ((x.shape[0], 1), (1, 256))
        if not works and x.shape[0] == 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling it")

    monkeypatch.setattr(torch, "_scaled_mm", product)
    gpu.torch_has_product.cache_clear()
    for _ in "ab":
        assert gpu.torch_has_product(torch.device("cpu")) is works
    gpu.torch_has_product.cache_clear()
    kinds = [(rows, biased, torch.bfloat16) for rows in (1, 48) for biased in (False, True)]
    assert asked == (kinds if works else kinds[:1])
    assert ("NOT_SUPPORTED" in caplog.text) is not works
