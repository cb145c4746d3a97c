"""The house of the Triton kernels: who runs them, what is recorded, how they are interpreted."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tokenfleet.kernels import backend as backend_module
from tokenfleet.kernels.gpu.interpreter import convert_float
from tokenfleet.kernels.gpu.launch import TARGETS, gpu_of, launch, recording
from tokenfleet.kernels.token_pool import gather_tokens

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU rounds by itself")


@triton.jit
def scale(x, out, count, factor, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    wide = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, wide * factor, mask=at < count)


def test_recording_describes_a_launch_and_runs_nothing():
    x, out = torch.ones(40), torch.zeros(40)
    with recording(TARGETS[80]) as launches:
        launch(scale, (1,), x, out[1:], 33, 0.5, TILE=64, num_warps=2)
        assert gpu_of(x.device).arch == 80
    assert torch.equal(out, torch.zeros(40))
    (one,) = launches
    types = {"x": "*fp32", "out": "*fp32", "count": "i32", "factor": "fp32", "TILE": "constexpr"}
    assert one.signature == types
    assert one.constants == {"TILE": 64}
    assert one.divisible == (0,)  # out[1:] is not aligned, 33 is odd
    assert (one.num_warps, one.grid) == (2, (1,))


def test_recording_takes_the_triton_form_of_meta_tensors_and_ends():
    ids = torch.zeros(5, dtype=torch.int64, device="meta")
    with backend_module.using("reference"):
        with recording(TARGETS[90]) as launches:
            gather_tokens(ids, ids, ids, ids.bool())
        assert len(launches) == 1
        gather_tokens(ids, ids, ids, ids.bool())
        assert len(launches) == 1


def test_a_launch_with_a_parameter_missing_is_refused():
    with recording(TARGETS[90]), pytest.raises(TypeError, match="scale takes"):
        launch(scale, (1,), torch.ones(4), TILE=4)


def test_an_empty_grid_launches_nothing(device):
    x = torch.ones(4, device=device)
    launch(scale, (0,), x, x, 4, 7.0, TILE=4)
    assert torch.equal(x, torch.ones(4, device=device))


@interpreted
def test_without_gpu_or_interpreter_triton_is_refused_and_auto_is_not():
    code = (
        "from tokenfleet.kernels.backend import Backend; b = Backend(); b.select('auto');"
        "assert not b.triton_devices; b.select('triton')"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "RuntimeError: TOKENFLEET_KERNELS=triton needs a CUDA device" in done.stderr


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8e4nv", "fp8e5"])
def test_mended_interpreter_rounds_as_torch_does(name):
    dtypes = {
        "bf16": (tl.bfloat16, torch.bfloat16),
        "fp16": (tl.float16, torch.float16),
        "fp8e4nv": (tl.float8e4nv, torch.float8_e4m3fn),
        "fp8e5": (tl.float8e5, torch.float8_e5m2),
    }
    target, dtype = dtypes[name]
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 30
    x[:2] = torch.tensor([torch.nan, 1.9999])
    bits = convert_float(x.numpy(), tl.float32, target)
    carrier = np.int8 if dtype.itemsize == 1 else np.int16
    got = torch.from_numpy(bits.view(carrier)).view(dtype)
    assert torch.equal(got.float().nan_to_num(9e9), x.to(dtype).float().nan_to_num(9e9))
    back = convert_float(bits, target, tl.float32).view(np.float32)
    assert torch.equal(torch.from_numpy(back).nan_to_num(9e9), got.float().nan_to_num(9e9))


def test_float8_saturates():
    bits = convert_float(np.float32([1e9, -500.0]), tl.float32, tl.float8e4nv)
    assert bits.tolist() == [0x7E, 0xFE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 63])
def test_a_kernel_rounds_once(dtype, count, device):
    x = torch.randn(count, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    out = torch.empty_like(x)
    launch(scale, (1,), x, out, count, 0.3, TILE=64)
    assert torch.equal(out, (x.float() * 0.3).to(dtype))
