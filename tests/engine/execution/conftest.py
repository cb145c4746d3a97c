"""Cores whose steps are captured without a GPU: recorded operations in place of CUDA graphs."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from tokenfleet.engine import EngineConfig, EngineCore, EngineRequest
from tokenfleet.engine.execution.capture import RecordedCapture
from tokenfleet.engine.execution.loading import load_model
from tokenfleet.engine.model import decoder
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import Loader
from tokenfleet.engine.model.tensor_source import RandomTensors
from tokenfleet.kernels import backend


def token_by_token(q, pool, batch, *, scale, window=None, softcap=None):
    """paged_attention with each token as a sequence of its own, and no look at any length."""
    T, Hq, _ = q.shape
    row = torch.arange(T, device=q.device)
    owner = torch.searchsorted(batch.query_starts, row.int(), right=True) - 1
    inside = owner < batch.num_sequences  # the others are padding
    owner = owner.clamp(max=batch.num_sequences - 1)
    stored = torch.minimum(batch.positions + 1, batch.kv_lens[owner].long()) * inside
    tables = batch.block_tables.index_select(0, owner).long()

    def gathered(blocks):
        return (
            blocks[tables]
            .transpose(1, 2)
            .flatten(2, 3)
            .repeat_interleave(Hq // blocks.shape[1], dim=1)
        )  # [T, Hq, L, D]

    keys, values = gathered(pool.k), gathered(pool.v)
    column = torch.arange(keys.shape[2], device=q.device)
    seen = column < stored[:, None]
    if window is not None:
        seen = seen & (column >= stored[:, None] - window)
    scores = (q[:, :, None] * keys).sum(-1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    weights = weights.masked_fill(~seen[:, None], 0.0)
    return (weights[..., None] * values.masked_fill(~seen[:, None, :, None], 0.0)).sum(2)


class Blank(RandomTensors):
    """Tensors of the right shape."""

    def __init__(self):
        pass

    def __contains__(self, name):
        return not name.endswith("_scale")

    def take(self, name, shape, dtypes=()):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


@pytest.fixture
def blank_decoder(tiny_random) -> Callable[..., decoder.Decoder]:
    """blank_decoder(family, quantization, kv_dtype) -> a small decoder in bf16 without data."""

    def make(family, quantization=None, kv_dtype=None):
        spec = read_spec(tiny_random(family), max_model_len=None)
        device = torch.device("meta")
        return Loader(Blank(), spec, torch.bfloat16, device, quantization, kv_dtype).decoder()

    return make


@pytest.fixture
def reference_kernels(monkeypatch) -> Iterator[None]:
    """Operations that torch's dispatcher sees, and no other."""
    monkeypatch.setattr(decoder, "paged_attention", token_by_token)
    with backend.using("reference"):
        yield


@pytest.fixture
def make_core(reference_kernels) -> Callable[..., EngineCore]:
    """make_core(path, capture=None, **settings) -> a core on the CPU; eager without a capture."""

    def make(path, capture=None, known=None, **changes):
        settings = {
            "max_num_seqs": 9, "max_num_batched_tokens": 40, "block_size": 4, "num_blocks": 90,
            "max_model_len": 64, "dtype": "float32", "device": "cpu", "seed": 1,
        }  # fmt: skip
        config = EngineConfig(path, **{**settings, **changes})
        load = partial(load_model, capture=capture)
        return EngineCore(config, load=load, known_tokens=known)

    return make


@pytest.fixture
def recorded() -> RecordedCapture:
    return RecordedCapture()


@pytest.fixture
def play() -> Callable[..., list]:
    """play(core, prompts, params, each_step=None) -> (token ids, finish reason, error) of each."""

    def run(core, prompts, params, each_step=None):
        found = [([], None, None)] * len(prompts)
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            core.add(EngineRequest(str(i), prompt, own))
        while core.has_work:
            for event in core.step():
                i = int(event.id)
                found[i] = (found[i][0] + event.token_ids, event.finish_reason, event.error)
            core.audit()
            if each_step is not None:
                each_step()
        return found

    return run
