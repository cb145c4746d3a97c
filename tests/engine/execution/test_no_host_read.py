"""What is captured on a GPU never looks at a value on the host: tensors without data have none."""

import pytest
import torch

from tokenfleet.engine.execution.buckets import decode_buckets, mixed_buckets
from tokenfleet.engine.execution.graphs import DeviceTables, StepGraphs
from tokenfleet.kernels import backend
from tokenfleet.kernels.fp8 import FP8

pytest.importorskip("triton", reason="the launches are those of Triton kernels")

DEVICE = torch.device("meta")


class NoTransfers:
    """Copies nothing: only what is captured is looked at."""

    def send(self, array):
        raise AssertionError("captured work sends nothing")

    def refill(self, tensor, array):
        assert tensor.numel() == array.size


class Watched:
    """Runs the work as a capture does: once to warm up, once to record."""

    def __init__(self):
        self.captured = 0

    def __call__(self, work):
        work()
        work()
        self.captured += 1
        return work


@pytest.mark.parametrize(
    ("family", "quantization", "kv_dtype"),
    [("llama", None, None), ("qwen3", "fp8", FP8), ("gemma3_text", "fp8_block", None)],
)
def test_every_bucket_is_captured_without_a_host_read(
    family, quantization, kv_dtype, blank_decoder
):
    from tokenfleet.kernels.gpu.launch import TARGETS, recording

    buckets = decode_buckets(5) + mixed_buckets(40, 5)
    capture = Watched()
    with (
        backend.using("reference"),
        torch.inference_mode(),
        recording(TARGETS[90]) as launches,
    ):
        decoder = blank_decoder(family, quantization, kv_dtype)
        launches.clear()
        StepGraphs(
            decoder,
            decoder.make_pools(9, 16),
            buckets,
            tables=DeviceTables(5, 16, NoTransfers(), DEVICE),
            newest=torch.zeros(6, dtype=torch.int64, device=DEVICE),
            unknown=torch.zeros(2, dtype=torch.int64, device=DEVICE),
            max_len=256,
            transfers=NoTransfers(),
            capture=capture,
        )
    assert capture.captured == 3 * len(buckets)
    names = {launch.name for launch in launches}
    assert {"_attention", "_look_up_tokens", "_settle"} <= names


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, bool, torch.nonzero])
def test_a_host_read_would_be_seen(read):
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|tolist"):
        read(torch.zeros(1, device=DEVICE))
