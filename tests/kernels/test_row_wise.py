"""Threads that take rows of their own through several operations change no bit of any."""

from collections.abc import Iterator

import pytest
import torch

from tokenfleet.kernels import backend
from tokenfleet.kernels.activation import silu_mul
from tokenfleet.kernels.gated import gated_linear
from tokenfleet.kernels.gated_mlp import gated_mlp
from tokenfleet.kernels.linear import linear, pack_linear
from tokenfleet.kernels.norm import add_rms_norm, add_rms_norm_int8, rms_norm
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.recording import record_rows
from tokenfleet.kernels.rope_kv import rope_and_write_kv
from tokenfleet.kernels.workspace import Workspace

WIDTH, INNER, HEADS, KV_HEADS, DIM, BLOCK = 64, 128, 3, 1, 16, 8
MOST_ROWS = 800


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    try:
        with backend.using("cpp"):
            yield
    finally:
        torch.set_num_threads(before)


def draw(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Between:
    """What a decoder does from one attention to the next, and some kernels beside it."""

    def __init__(self, dtype, quantization, kv_dtype):
        def packed(inputs, outputs, seed):
            weight = draw((outputs, inputs), dtype, seed) / inputs**0.5
            return pack_linear(weight, draw((outputs,), dtype, seed), quantization=quantization)

        heads = (HEADS + 2 * KV_HEADS) * DIM
        self.out, self.qkv = packed(WIDTH, WIDTH, 1), packed(WIDTH, heads, 2)
        self.gate_up, self.down = packed(WIDTH, 2 * INNER, 3), packed(INNER, WIDTH, 4)
        self.norm, self.head_norm = draw((WIDTH,), dtype, 5), draw((DIM,), dtype, 6)
        self.enter = add_rms_norm_int8 if quantization == "int8" else add_rms_norm
        shape = (MOST_ROWS // BLOCK + 1, KV_HEADS, BLOCK, DIM)
        scales = [torch.zeros(shape[:3]) if kv_dtype == torch.int8 else None for _ in range(2)]
        keys, values = (torch.zeros(shape, dtype=kv_dtype) for _ in range(2))
        self.pool = KVPool(keys, values, 1.0, 1.0, *scales)
        self.cos_sin = draw((MOST_ROWS, DIM), torch.float32, 7)
        self.batch = AttentionBatch(
            query_starts=torch.zeros(2, dtype=torch.int32),
            kv_lens=torch.ones(1, dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            slots=torch.arange(BLOCK, BLOCK + MOST_ROWS).flip(0).contiguous(),
            positions=torch.arange(MOST_ROWS),
            num_decodes=0,
            max_query_len=MOST_ROWS,
            max_kv_len=MOST_ROWS,
        )

    def __call__(self, mixed, residual):
        x, residual = self.enter(linear(mixed, self.out), residual, self.norm, 1e-5)
        added = gated_mlp(x, self.gate_up, self.down, silu_mul)
        x, residual = self.enter(added, residual, self.norm, 1e-5)
        added = linear(gated_linear(x, self.gate_up, silu_mul), self.down)
        x, residual = self.enter(added, residual, self.norm, 1e-5)
        heads = linear(x, self.qkv).view(-1, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = heads.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q = rms_norm(q, self.head_norm, 1e-5)
        return rope_and_write_kv(q, k, v, self.cos_sin, self.pool, self.batch)

    def cached(self):
        pool = self.pool
        return [x.clone() for x in (pool.k, pool.v, pool.k_scales, pool.v_scales) if x is not None]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_dtype"),
    [
        (torch.bfloat16, "int8", torch.int8),
        (torch.float32, "int8", torch.float32),
        (torch.float16, "int8", torch.float16),
        (torch.bfloat16, None, torch.bfloat16),
    ],
    ids=str,
)
def test_rows_of_a_program_get_the_same_bits_whoever_takes_them(dtype, quantization, kv_dtype):
    between = Between(dtype, quantization, kv_dtype)
    if not between.out.packed:
        pytest.skip("this CPU has no AVX2")
    mixed, residual = (draw((MOST_ROWS, WIDTH), dtype, seed) for seed in (8, 9))
    expected = between(mixed, residual)
    cached = between.cached()
    program = record_rows(lambda: between(mixed, residual), Workspace(), MOST_ROWS)
    for rows in (MOST_ROWS, 255, 411, 571):
        for kept in (between.pool.k, between.pool.v):
            kept.zero_()
        assert torch.equal(program.run(rows, 1), expected[:rows])
        for now, whole in zip(between.cached(), cached, strict=True):
            written = slice(MOST_ROWS + BLOCK - rows, None)
            tokens = now.transpose(1, 2).flatten(0, 1), whole.transpose(1, 2).flatten(0, 1)
            assert torch.equal(tokens[0][written], tokens[1][written])
