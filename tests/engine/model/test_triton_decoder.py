"""A decoder over the Triton kernels computes what it does over the references.

Without a GPU the kernels run in Triton's interpreter, which has to be asked for before anything
imports triton.
"""

import os
from functools import partial

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")

from tokenfleet.engine.model import one_row
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import load_decoder
from tokenfleet.kernels.backend import using
from tokenfleet.kernels.paged_attention import AttentionBatch


def step(decoder, tokens):
    """Logits of a prompt in one chunk."""
    T = len(tokens)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, T], dtype=torch.int32),
        kv_lens=torch.tensor([T], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slots=torch.arange(16, 16 + T),
        positions=torch.arange(T),
        num_decodes=0,
        max_query_len=T,
        max_kv_len=T,
    )
    pools = decoder.make_pools(2, 16)
    with torch.inference_mode():
        ids = torch.tensor(tokens)
        return decoder.logits(decoder.forward(ids, batch, pools)).cpu()


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
         "hidden_size": 64, "intermediate_size": 48}  # fmt: skip
KINDS = {
    "wide": ("qwen3", {}),
    "fp8": ("llama", {"quantization": "fp8"}),
    "fp8 blocks, cache": ("qwen3", {"quantization": "fp8_block", "kv_dtype": torch.float8_e4m3fn}),
    "experts": ("mixtral", {}),
    "fp8 experts": ("mixtral", {"quantization": "fp8_block"}),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/engine/execution runs it on the GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_models_step_is_the_references(tiny_random, kind):
    family, options = KINDS[kind]
    path = tiny_random(family, **SMALL)
    logits = {}
    for choice in ("triton", "reference"):
        with using(choice):
            decoder = load_decoder(
                path, read_spec(path), dtype=torch.float32, device="cpu", **options
            )
            logits[choice] = step(decoder, [5, 77, 200, 5, 256, 31])
    error = (logits["triton"] - logits["reference"]).norm() / logits["reference"].norm()
    # a value on the edge between two codes may fall to either side
    assert error < (0.02 if "fp8" in kind else 1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/engine/execution runs it on the GPU")
@pytest.mark.parametrize(
    ("family", "fused"), [("qwen3", True), ("qwen2", True), ("mistral", True), ("olmo2", False)]
)
def test_a_step_of_one_token_is_the_references_in_few_launches(
    tiny_random, family, fused, monkeypatch
):
    path, logits, ways = tiny_random(family, **SMALL), {}, []
    way = one_row.layers
    monkeypatch.setattr(one_row, "layers", lambda *args: ways.append(1) or way(*args))
    for choice in ("triton", "reference"):
        with using(choice), torch.inference_mode():
            decoder = load_decoder(path, read_spec(path), dtype=torch.float32, device="cpu")
            pools = decoder.make_pools(2, 16)
            for place, token in enumerate([5, 77, 200]):
                batch = one_token(place)
                hidden = decoder.forward(torch.tensor([token]), batch, pools)
            logits[choice] = decoder.logits(hidden)
    error = (logits["triton"] - logits["reference"]).norm() / logits["reference"].norm()
    assert error < 1e-5
    assert len(ways) == (3 if fused else 0)


def one_token(place):
    """The step of a sequence's token at this position."""
    ids = partial(torch.tensor, dtype=torch.int32)
    where = torch.tensor([place])
    return AttentionBatch(
        ids([0, 1]), ids([place + 1]), ids([[1]]), where + 16, where, 1, 1, place + 1
    )
