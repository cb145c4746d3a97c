"""The largest step that a config allows, run for its memory before there are KV blocks.

It has as many tokens as the budget and as many sampled rows as there are slots, each penalised over
a whole context, listed and filtered; only one block exists, so nothing that it computes means
anything. What no graph will hold is compiled by it, before the first job comes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.kernels.paged_attention import AttentionBatch
from tokenfleet.kernels.sampling import PenaltyRows, SamplingRows, greedy, penalise, sample


@torch.inference_mode()
def run_largest_step(decoder: Decoder, config: EngineConfig, block_size: int, max_len: int) -> None:
    """One step of all slots: one long chunk, and single tokens."""
    device, S = decoder.device, config.max_num_seqs
    T = max(config.max_num_batched_tokens, S)
    pools = decoder.make_pools(1, block_size)
    for pool in pools:
        for side in (pool.k, pool.v):
            side.view(torch.uint8).zero_()
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
