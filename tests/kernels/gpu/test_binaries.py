"""A kernel is compiled while an engine starts, never because a step has another size than others.

Triton compiles anew for an integer that is 1, or that 16 divides; so one that says how large a step
is must not be looked at.
"""

import pytest
import torch

from tokenfleet.kernels import fp8
from tokenfleet.kernels.activation import silu_mul, silu_mul_fp8
from tokenfleet.kernels.block_copy import copy_blocks
from tokenfleet.kernels.fp8 import Fp8Scales
from tokenfleet.kernels.gpu import linear as gpu_linear
from tokenfleet.kernels.gpu.launch import TARGETS, recording
from tokenfleet.kernels.norm import add_rms_norm, add_rms_norm_fp8, rms_norm
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool, paged_attention
from tokenfleet.kernels.rope_kv import rope_and_write_kv
from tokenfleet.kernels.sampling import PenaltyRows, SamplingRows, penalise, sample
from tokenfleet.kernels.token_mask import allow_only
from tokenfleet.kernels.token_pool import gather_tokens, scatter_tokens

WIDTH, DIM = 256, 64
FORMS = {"token": (1, WIDTH), "group": (128, 128)}


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def ids(*shape):
    return empty(*shape, dtype=torch.int64)


def attention_of(tokens, *, decode):
    """A step of `tokens` one-token sequences, or of a chunk of so many."""
    sequences = tokens if decode else 1
    batch = AttentionBatch(
        query_starts=empty(sequences + 1, dtype=torch.int32),
        kv_lens=empty(sequences, dtype=torch.int32),
        block_tables=empty(sequences, tokens, dtype=torch.int32),
        slots=ids(tokens), positions=ids(tokens), num_decodes=0,
        max_query_len=1 if decode else 1000, max_kv_len=200,
    )  # fmt: skip
    pool = empty(9, 2, 16, DIM)
    return empty(tokens, 4, DIM), KVPool(pool, pool), batch


def decode_attention(n):
    paged_attention(*attention_of(n, decode=True), scale=1.0)


def chunk_attention(n):
    paged_attention(*attention_of(n, decode=False), scale=1.0)


def rotation(n):
    q, pool, batch = attention_of(n + 64, decode=False)  # beyond those of one token a program
    k = empty(n + 64, 2, DIM)
    table = empty(512, DIM, dtype=torch.float32)
    rope_and_write_kv(q, k, k, table, pool, batch)


def norms(n):
    x, weight, scales = empty(n, WIDTH), empty(WIDTH), fp8_scales("token")
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x, weight, 1e-6)
    add_rms_norm_fp8(x, x, weight, 1e-6, scales)


def head_norms(n):
    rms_norm(empty(n, 8, DIM)[:, :4], empty(DIM), 1e-6)


def gates(n):
    silu_mul(empty(n, 2 * WIDTH))
    silu_mul_fp8(empty(n, 2 * WIDTH), fp8_scales("group"))


def products(n):
    for form in FORMS:
        scales = fp8_scales(form)
        x = fp8.quantize_inputs(empty(n + 128, WIDTH), scales)  # one size of tile
        gpu_linear.product(x, empty(WIDTH, WIDTH, dtype=fp8.FP8), scales, empty(WIDTH))


def drawing(n):
    one = empty(n, dtype=torch.float32)
    keys = empty(n, 2, dtype=torch.int32)
    sample(empty(n, 50048, dtype=torch.float32), SamplingRows(one, ids(n), one, one, keys, True))


def penalties(n):
    one = empty(3, dtype=torch.float32)
    logits = empty(3, 512, dtype=torch.float32)
    penalise(logits, PenaltyRows(ids(3, n), ids(3), ids(3), one, one, one))


def token_pool(n):
    pool = ids(40)
    gather_tokens(ids(n), pool, ids(n), ids(n).bool())
    scatter_tokens(ids(n), pool, ids(n))


def copies(n):
    pairs, pool = ids(2, n), empty(9, 2, 16, DIM)
    copy_blocks(KVPool(pool, pool), pairs[0], pairs[1])


def masks(n):
    logits = empty(n + 3, 512, dtype=torch.float32)
    allow_only(logits, ids(n), empty(n, 16, dtype=torch.int32))


def fp8_scales(form):
    rows, columns = FORMS[form]
    weight = empty(-(-WIDTH // rows), WIDTH // columns, dtype=torch.float32)
    return Fp8Scales(weight, rows, columns, form)


STEPS = [decode_attention, chunk_attention, rotation, norms, head_norms, gates, products, drawing,
         penalties, token_pool, copies, masks]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_one_binary_serves_every_size_of_a_step(step):
    """Whatever is a constant of a kernel was chosen to be one; what is not must not become one."""
    compiled_for = []
    for size in (1, 2, 16, 33, 48):
        with recording(TARGETS[90]) as launches:
            step(size)
        compiled_for.append([x.key() for x in launches])
    assert compiled_for[0]
    for other in compiled_for[1:]:
        assert other == compiled_for[0]
