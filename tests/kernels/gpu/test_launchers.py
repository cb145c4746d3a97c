"""All launchers together: none waits for the device, and torch multiplies where it can."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenfleet.kernels.fp8 import Fp8Scales
from tokenfleet.kernels.gpu import linear as gpu
from tokenfleet.kernels.gpu.launch import TARGETS, recording
from tokenfleet.kernels.gpu.registry import OPERATIONS, examples

pytestmark = pytest.mark.usefixtures("triton_kernels")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_launcher_waits_for_the_device(operation):
    """A meta tensor has no value: `.item()`, `.tolist()` or a condition on it would raise."""
    with recording(TARGETS[90]) as launches:
        for example in examples(torch.device("meta"), [operation], long=False):
            example.run()
    assert launches


@pytest.mark.parametrize(
    ("arch", "columns", "rows", "ours"),
    [(90, 256, 1, 0), (100, 256, 1, 0), (90, 250, 1, 1), (80, 256, 1, 1), (90, 128, 128, 1)],
)
def test_torch_multiplies_where_it_has_the_form(arch, columns, rows, ours):
    with recording(TARGETS[arch]) as launches, FakeTensorMode():
        scales = Fp8Scales(torch.ones((64 // rows or 1, 1), device="cuda"), rows, columns, "token")
        codes = torch.empty((64, columns), dtype=torch.float8_e4m3fn, device="cuda")
        x = torch.empty((4, columns), dtype=torch.bfloat16, device="cuda")
        out = gpu.fp8_linear(x, codes, scales, torch.empty(64, dtype=x.dtype, device="cuda"))
    assert (out.shape, out.dtype) == ((4, 64), torch.bfloat16)
    assert sum(launch.name == "_product" for launch in launches) == ours
