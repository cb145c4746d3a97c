"""The products and the attention of a step of one token, against the operations one by one."""

from dataclasses import replace

import pytest
import torch

from tokenfleet.kernels.activation import gelu_tanh_mul, silu_mul
from tokenfleet.kernels.backend import using
from tokenfleet.kernels.gpu import row as gpu_row
from tokenfleet.kernels.gpu.launch import TARGETS, planning, recording
from tokenfleet.kernels.linear import linear, pack_linear
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.rope_kv import HeadNorms
from tokenfleet.kernels.row import RowNorm, reference, row_linear
from tokenfleet.kernels.row_attention import reference as attention_reference
from tokenfleet.kernels.row_attention import row_attention, takes

pytestmark = pytest.mark.usefixtures("triton_kernels")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
CASES = {
    "norm and bias": {"norm": True, "bias": True},
    "gate": {"gate": silu_mul},
    "norm, other gate and bias": {"norm": True, "gate": gelu_tanh_mul, "bias": True},
    "residual": {"add": True},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("N", "K"), [(1, 63), (123, 1000), (20, 1536)])
def test_a_product_of_one_row_is_that_of_the_operations_one_by_one(N, K, case, dtype, device):
    asked = {"norm": False, "gate": None, "bias": False, "add": False} | CASES[case]
    torch.manual_seed(N + K)
    rows = N * (2 if asked["gate"] else 1)

    def made(*shape):
        return torch.randn(*shape).to(dtype).to(device)

    weight, x = made(rows, K) / K**0.5, made(1, K)
    packed = pack_linear(weight, made(rows) if asked["bias"] else None)
    norm = RowNorm(made(K), 1e-5, 0.5) if asked["norm"] else None
    rest = {"gate": asked["gate"], "add": made(1, N) if asked["add"] else None}
    got = row_linear(x, packed, norm=norm, **rest)
    with using("reference"):
        wide = pack_linear(weight.double(), None if packed.bias is None else packed.bias.double())
        rest["add"] = None if rest["add"] is None else rest["add"].double()
        exact = None if norm is None else RowNorm(norm.weight.double(), norm.eps, norm.offset)
        expected = reference(x.double(), wide, norm=exact, **rest)
    assert got.dtype == dtype
    assert got.shape == (1, N)
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]


def test_few_outputs_are_divided_among_more_programs():
    with recording(TARGETS[90]) as launches:
        for rows in (1024, 4096):
            x, weight = (
                torch.empty(n, 2048, dtype=torch.bfloat16, device="meta") for n in (1, rows)
            )
            gpu_row.row_linear(x, weight, None, norm=None, eps=0.0, offset=0.0, add=None, gate=None)
    assert [launch.grid for launch in launches] == [(256,), (512,)]


def test_any_product_of_one_row_is_a_reading_of_its_weight():
    with recording(TARGETS[90]) as launches:
        weight = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
        out = linear(torch.empty(1, 32, dtype=weight.dtype, device="meta"), pack_linear(weight))
        linear(torch.empty(2, 32, dtype=weight.dtype, device="meta"), pack_linear(weight))
    assert [launch.name for launch in launches] == ["_row"]
    assert out.shape == (1, 64)


ATTENTIONS = {
    "plain": {},
    "norms": {"norms": True},
    "long": {"kv_len": 333, "max_kv_len": 4096, "norms": True},
    "window": {"kv_len": 100, "window": 37},
    "window of one": {"kv_len": 100, "window": 1},
    "cap": {"softcap": 20.0},
    "first token": {"kv_len": 1, "max_kv_len": 1024},
    "part of a head": {"dim": 80, "rot_dim": 20},
    "many heads": {"heads": 34, "kv_heads": 2},
    "fp8": {"kv_dtype": torch.float8_e4m3fn, "kv_len": 70, "norms": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_of_one_token_writes_and_gives_what_the_operations_do(
    case, dtype, make_paged, guarded, device
):
    asked = {
        "kv_len": 50, "heads": 6, "kv_heads": 3, "dim": 64, "rot_dim": None, "window": None,
        "softcap": None, "norms": False, "kv_dtype": dtype, "max_kv_len": None,
    } | ATTENTIONS[case]  # fmt: skip
    dim, heads, kv_heads = asked["dim"], asked["heads"], asked["kv_heads"]
    paged = make_paged([1], [asked["kv_len"]], kv_heads=kv_heads, dim=dim)
    made = {}
    for name in ("triton", "reference"):
        pools = []
        for stored in (paged.pool.k, paged.pool.v):
            place = guarded(stored.shape, asked["kv_dtype"])
            place.copy_(stored.to(asked["kv_dtype"]))
            pools.append(place)
        made[name] = KVPool(*pools, *((0.05, 0.5) if asked["kv_dtype"].itemsize == 1 else ()))
    held = paged.batch
    batch = AttentionBatch(
        *(x.to(device) for x in (held.query_starts, held.kv_lens, held.block_tables)),
        held.slots.to(device), held.positions.to(device), 1, 1,
        asked["max_kv_len"] or held.max_kv_len,
    )  # fmt: skip
    assert takes(batch)
    torch.manual_seed(1)
    qkv = torch.randn(1, (heads + 2 * kv_heads) * dim).to(dtype).to(device)
    angles = torch.randn(asked["kv_len"], asked["rot_dim"] or dim).to(device)
    gains = [torch.randn(dim).to(dtype).to(device) for _ in "qk"]
    options = {
        "heads": heads, "scale": 0.2, "window": asked["window"], "softcap": asked["softcap"],
        "norms": HeadNorms(*gains, 1e-5, 0.25) if asked["norms"] else None,
    }  # fmt: skip
    with planning(TARGETS[90]):
        got = row_attention(qkv, angles, made["triton"], batch, **options)
    with using("reference"):
        whole = replace(batch, max_kv_len=held.max_kv_len)
        expected = attention_reference(qkv, angles, made["reference"], whole, **options)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for ours, theirs in ((made["triton"].k, made["reference"].k),
                         (made["triton"].v, made["reference"].v)):  # fmt: skip
        if asked["kv_dtype"] == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:  # rounded: a value on the edge may fall to either side
            same = ours.view(torch.uint8) == theirs.view(torch.uint8)
            assert same.float().mean() > 0.99


def test_a_padding_row_writes_nothing_and_gives_zeros(make_paged, guarded, device):
    paged = make_paged([1], [9])
    k, v = (guarded(paged.pool.k.shape, torch.float32) for _ in "kv")
    before = k.clone(), v.clone()
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    batch = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32, device=device), zero,
        paged.batch.block_tables.to(device), torch.full((1,), -1, device=device), zero.long(),
        1, 1, 4096,
    )  # fmt: skip
    qkv, angles = torch.randn(1, 12 * 64, device=device), torch.randn(9, 64, device=device)
    out = row_attention(qkv, angles, KVPool(k, v), batch, heads=6, scale=1.0)
    assert out.eq(0).all()
    assert all(torch.equal(x.view(torch.int32), y.view(torch.int32))
               for x, y in zip((k, v), before, strict=True))  # fmt: skip


@pytest.mark.parametrize(("lens", "fits"), [([1], True), ([1, 1], False), ([2], False)])
def test_only_a_step_of_one_token_goes_this_way(lens, fits, make_paged):
    assert takes(make_paged(lens, [20] * len(lens)).batch) == fits
