"""A whole forward pass in Triton kernels, interpreted, equals the one in plain torch."""

import os

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tokenfleet.kernels.backend import using

STEPS = [{0: [3, 141, 59, 26, 5, 35, 89]}, {0: [79], 1: [32, 38, 46]}, {0: [26], 1: [43]}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's tensors lie on the CPU")
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_chunks_decodes_and_both_in_triton_kernels(tiny_random, driver, family):
    path, found = tiny_random(family), {}
    for choice in ("reference", "triton"):
        with using(choice):
            one = driver(path)
            one.add(2)
            found[choice] = [one.step(chunks) for chunks in STEPS]
    for got, wanted in zip(found["triton"], found["reference"], strict=True):
        for sequence, logits in wanted.items():
            torch.testing.assert_close(got[sequence], logits, atol=1e-4, rtol=0)
