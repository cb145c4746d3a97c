"""What every kernel test shares: an oracle in float64 loops, and batches over a poisoned pool.

Triton kernels run on the GPU where there is one, otherwise in Triton's interpreter, which has to be
asked for before anything imports triton.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tokenfleet.kernels import backend as backend_module
from tokenfleet.kernels.linear import quantize_rows
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool


class Oracle:
    """Every operation again, one number at a time in float64; shares no code with the kernels."""

    @staticmethod
    def attention(q, keys, values, kv_len, *, scale, window=None, softcap=None, sinks=None):
        """q [Q, Hq, D]: the last Q tokens; keys, values [L, Hkv, D] with L >= kv_len."""
        num_queries, num_heads, dim = q.shape
        group = num_heads // keys.shape[1]
        out = np.zeros((num_queries, num_heads, dim))
        for i in range(num_queries):
            position = kv_len - num_queries + i
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                k = keys[first : position + 1, head // group]
                v = values[first : position + 1, head // group]
                scores = (scale * (k @ q[i, head])).tolist()
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                logits = scores + ([sinks[head]] if sinks is not None else [])
                top = max(logits)
                total = math.fsum(math.exp(x - top) for x in logits)
                for score, row in zip(scores, v, strict=True):
                    out[i, head] += math.exp(score - top) / total * row
        return out

    @staticmethod
    def rotate(x, positions, cos_sin, interleaved):
        """x [T, H, D], one position a token."""
        out = x.copy()
        half = cos_sin.shape[1] // 2
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            cos, sin = cos_sin[positions, i][:, None], cos_sin[positions, half + i][:, None]
            out[..., a] = x[..., a] * cos - x[..., b] * sin
            out[..., b] = x[..., b] * cos + x[..., a] * sin
        return out

    @staticmethod
    def rms_norm(x, weight, eps, offset):
        return np.stack(
            [r / math.sqrt(math.fsum(r * r) / len(r) + eps) * (weight + offset) for r in x]
        )

    @staticmethod
    def silu(x):
        return x / (1.0 + math.exp(-x))

    @staticmethod
    def gelu_tanh(x):
        return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@dataclass
class Paged:
    """A batch over a pool in which all that no sequence has stored is NaN."""

    pool: KVPool
    batch: AttentionBatch
    keys: list[torch.Tensor]  # per sequence [kv_len, Hkv, D]: the values that the pool holds
    values: list[torch.Tensor]
    query_lens: list[int]
    owned: torch.Tensor  # bool [num_blocks, block_size]: positions that a sequence has stored


@pytest.fixture
def oracle() -> type[Oracle]:
    return Oracle


def empty_pool(shape: Sequence[int], dtype: torch.dtype) -> KVPool:
    """A pool in which all is NaN; in int8 by its scales."""
    if dtype != torch.int8:
        return KVPool(*(torch.full(tuple(shape), torch.nan, dtype=dtype) for _ in "kv"))
    codes = [torch.full(tuple(shape), -128, dtype=dtype) for _ in "kv"]
    scales = [torch.full(tuple(shape[:3]), torch.nan) for _ in "kv"]
    return KVPool(*codes, k_scales=scales[0], v_scales=scales[1])


@pytest.fixture(name="empty_pool")
def _empty_pool() -> Callable[..., KVPool]:
    return empty_pool


@pytest.fixture
def make_paged() -> Callable[..., Paged]:
    def make(
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        kv_heads: int = 3,
        dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Paged:
        rng = torch.Generator().manual_seed(seed)
        needed = [-(-n // block_size) for n in kv_lens]
        num_blocks = 2 * sum(needed) + 5  # the null block, and as many strangers as owned ones
        shape = (num_blocks, kv_heads, block_size, dim)
        pool = empty_pool(shape, dtype)
        owned = torch.zeros(num_blocks, block_size, dtype=torch.bool)
        free = (1 + torch.randperm(num_blocks - 1, generator=rng)).tolist()
        tables = torch.zeros(len(kv_lens), max([*needed, 1]) + 2, dtype=torch.int32)
        keys, values, slots, positions = [], [], [], []
        for s, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
            mine = torch.tensor([free.pop() for _ in range(needed[s])], dtype=torch.int64)
            tables[s, : needed[s]] = mine.int()
            at = torch.arange(kv_len)
            block, offset = mine[at // block_size], at % block_size
            for blocks, scales, held in (
                (pool.k, pool.k_scales, keys), (pool.v, pool.v_scales, values)
            ):  # fmt: skip
                drawn = torch.randn(kv_len, kv_heads, dim, generator=rng)
                if scales is None:
                    held.append(drawn.to(dtype))
                    blocks[block, :, offset] = held[-1]
                else:
                    codes, scale = quantize_rows(drawn.flatten(0, 1))
                    blocks[block, :, offset] = codes.view(drawn.shape)
                    scales[block, :, offset] = scale.view(drawn.shape[:2])
                    held.append((codes.double() * scale.double()[:, None]).view(drawn.shape))
            owned[block, offset] = True
            slots.append((block * block_size + offset)[kv_len - query_len :])
            positions.append(at[kv_len - query_len :])
        decodes = 0
        while decodes < len(query_lens) and query_lens[decodes] == 1:
            decodes += 1
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        batch = AttentionBatch(
            query_starts=starts,
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            block_tables=tables,
            slots=torch.cat(slots),
            positions=torch.cat(positions),
            num_decodes=decodes,
            max_query_len=max(query_lens),
            max_kv_len=max(kv_lens),
        )
        return Paged(pool, batch, keys, values, list(query_lens), owned)

    return make


@pytest.fixture(params=["reference", "cpp"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every conformance test runs once per implementation."""
    with backend_module.using(request.param) as name:
        assert name == request.param
        yield name


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run: the GPU, or the CPU in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operations run as their Triton form, and no output is by chance what it should be.

    Memory that torch.empty gives is NaN, or the most negative integer.
    """
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    with backend_module.using("triton"):
        yield


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: object, **options: object) -> torch.Tensor:
        return poison(make(*args, **options))

    return poisoned


def poison(x: torch.Tensor) -> torch.Tensor:
    """x, filled with what no result may hold."""
    if x.dtype.is_floating_point and x.itemsize == 1:
        x.view(torch.uint8).fill_(0x7F)  # NaN
    elif x.dtype.is_floating_point:
        x.fill_(torch.nan)
    elif x.dtype != torch.bool:
        x.fill_(torch.iinfo(x.dtype).min)
    return x


class Guarded:
    """A tensor between two guard zones, for memory that a kernel writes in place.

    `check()` fails when a byte of a zone has changed. Views of `tensor` are as good.
    """

    ZONE = 4096

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        size = math.prod(shape) * dtype.itemsize
        # the seed is fixed: a kernel cannot write the same bytes by chance
        self.bytes = torch.randint(
            0, 256, (size + 2 * self.ZONE,), dtype=torch.uint8, device=device,
            generator=torch.Generator(device).manual_seed(size),
        )  # fmt: skip
        self.zones = self._zones().clone()
        self.tensor = self.bytes[self.ZONE : self.ZONE + size].view(dtype).view(tuple(shape))
        poison(self.tensor)

    def _zones(self) -> torch.Tensor:
        return torch.cat([self.bytes[: self.ZONE], self.bytes[-self.ZONE :]])

    def check(self) -> None:
        assert torch.equal(self._zones(), self.zones), "a kernel wrote outside of its tensor"


@pytest.fixture
def guarded(device: torch.device) -> Iterator[Callable[..., torch.Tensor]]:
    """make(shape, dtype) -> poisoned tensor; its guard zones are checked when the test ends."""
    made: list[Guarded] = []

    def make(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made.append(Guarded(shape, dtype, device))
        return made[-1].tensor

    yield make
    for one in made:
        one.check()
