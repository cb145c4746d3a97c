"""The largest step that a config allows, run for its memory before there are KV blocks.

It has as many tokens as the budget and as many sampled rows as there are slots, each penalised over
a whole context, listed and filtered; only one block exists, so nothing that it computes means
anything. `run_other_steps` runs one of each kind that is neither that one nor captured, so that
its kernels are compiled before the first job comes, and not in the middle of somebody's stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.kernels.block_copy import copy_blocks
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.sampling import PenaltyRows, SamplingRows, greedy, penalise, sample
from tokenfleet.kernels.token_mask import allow_only
from tokenfleet.kernels.token_pool import gather_tokens, scatter_tokens

CHUNKS = (2, 8, 24, 64, 256, 1024)
"""Tokens of chunks that between them meet every size of tile."""
CONTEXTS = (1, 128, 256, 512, 1024, 2048)
"""Tokens of contexts whose keys are split among every number of programs."""


@torch.inference_mode()
def run_largest_step(decoder: Decoder, config: EngineConfig, block_size: int, max_len: int) -> None:
    """One step of all slots: one long chunk, and single tokens."""
    device, S = decoder.device, config.max_num_seqs
    T = max(config.max_num_batched_tokens, S)
    pools = _one_block(decoder, block_size)
    chunk = T - (S - 1)
    starts = torch.cat([torch.arange(S), torch.tensor([T])]).int().to(device)
    lens = torch.full((S,), max_len, dtype=torch.int32, device=device)
    lens[-1] = max(chunk, max_len)
    batch = AttentionBatch(
        query_starts=starts,
        kv_lens=lens,
        block_tables=torch.zeros(
            (S, -(-max(chunk, max_len) // block_size)), dtype=torch.int32, device=device
        ),
        slots=torch.full((T,), -1, device=device),
        positions=torch.zeros(T, dtype=torch.int64, device=device),
        num_decodes=S - 1,
        max_query_len=chunk,
        max_kv_len=max(chunk, max_len),
    )
    ids = torch.zeros(T, dtype=torch.int64, device=device)
    hidden = decoder.forward(ids, batch, pools)
    logits = decoder.logits(hidden[starts[1:].long() - 1])
    raw = logits.clone()  # of rows that list log probabilities
    penalised = _penalised(logits, max_len)
    for filtered in (True, False):
        sample(penalised, _drawn(S, decoder.spec.vocab_size, device, filtered=filtered))
    greedy(raw)


@torch.inference_mode()
def run_other_steps(decoder: Decoder, config: EngineConfig, block_size: int, max_len: int) -> None:
    """A chunk of each length for which kernels may differ, alone in a step; decodes alone; keys few
    and many. And what goes with steps: tokens on the device are read and written, a block copied, a
    grammar obeyed.
    """
    device, pools = decoder.device, _one_block(decoder, block_size)
    for count in (length for length in CHUNKS if length <= config.max_num_batched_tokens):
        for longest in sorted({count, max(count, max_len)}):
            _run_step(decoder, pools, [count], longest)
    for sequences in sorted({1, min(2, config.max_num_seqs), config.max_num_seqs}):
        for longest in (length for length in (*CONTEXTS, max_len) if length <= max_len):
            _run_step(decoder, pools, [1] * sequences, longest)
    nobody = torch.full((3,), -1, dtype=torch.int64, device=device)
    newest = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=device)
    gather_tokens(nobody, newest, nobody, nobody > 0)
    scatter_tokens(nobody, newest, nobody)
    for pool in pools:
        copy_blocks(pool, nobody + 1, nobody)
    vocab_size = decoder.spec.vocab_size
    everything = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
    allow_only(torch.zeros((1, vocab_size), device=device), nobody[:1] + 1, everything)


def _run_step(decoder: Decoder, pools: list[KVPool], lengths: list[int], longest: int) -> None:
    """Sequences of so many new tokens each, and none of their KV written."""
    device, T, S = decoder.device, sum(lengths), len(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = AttentionBatch(
        query_starts=starts.to(device),
        kv_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
        block_tables=torch.zeros(
            (S, -(-longest // pools[0].block_size)), dtype=torch.int32, device=device
        ),
        slots=torch.full((T,), -1, device=device),
        positions=torch.zeros(T, dtype=torch.int64, device=device),
        num_decodes=lengths.count(1),
        max_query_len=max(lengths),
        max_kv_len=longest,
    )
    hidden = decoder.forward(torch.zeros(T, dtype=torch.int64, device=device), batch, pools)
    decoder.logits(hidden[:S])


def _one_block(decoder: Decoder, block_size: int) -> list[KVPool]:
    """Pools of the null block alone, all zeros."""
    pools = decoder.make_pools(1, block_size)
    for pool in pools:
        for side in (pool.k, pool.v):
            side.view(torch.uint8).zero_()
    return pools


def _penalised(logits: Tensor, length: int) -> Tensor:
    """The logits [S, V] of rows of that many tokens; a copy, as where others are not penalised."""
    S, device = logits.shape[0], logits.device
    lengths = torch.full((S,), length, device=device)
    none = torch.zeros(S, device=device)
    history = torch.zeros((S, length), dtype=torch.int64, device=device)
    rows = PenaltyRows(history, torch.zeros_like(lengths), lengths, none, none, none + 1.0)
    return penalise(logits.clone(), rows)


def _drawn(S: int, vocab_size: int, device: torch.device, *, filtered: bool) -> SamplingRows:
    return SamplingRows(
        temperature=torch.ones(S, device=device),
        top_k=torch.full((S,), vocab_size // 2, device=device),
        top_p=torch.full((S,), 0.9, device=device),
        min_p=torch.zeros(S, device=device),
        keys=torch.zeros((S, 2), dtype=torch.int32, device=device),
        filtered=filtered,
    )
