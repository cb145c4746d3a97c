"""What a captured step does around its layers, for all of its tokens and sequences at once: look up
where their keys and values go, and settle what each sequence's token is.

Both are a dozen small operations, and on CUDA one launch or two. A padding token (its slot is the
spare row of the tables) writes no KV, a padding sequence (of no tokens) no token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenfleet.kernels.backend import uses_triton
from tokenfleet.kernels.sampling import greedy
from tokenfleet.kernels.token_pool import gather_tokens, scatter_tokens

POISONED = -2
"""What stands in place of a token where the model gave NaN or an infinite value."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """T tokens of S sequences as a step gets them, int64 each."""

    ids: Tensor
    """[T], and whether another one is to be looked up: [T], not 0 where it is."""
    from_pool: Tensor
    positions: Tensor
    slots: Tensor
    """[T]: of the token's sequence."""
    sequence_slots: Tensor
    """[S]."""
    ends: Tensor
    """[S]: tokens of the sequence after this step."""
    starts: Tensor
    """[S + 1]: its first row."""


@dataclass(frozen=True, slots=True)
class Places:
    """The same as attention takes it."""

    ids: Tensor  # int64 [T]
    kv_slots: Tensor  # int64 [T]; -1 for padding
    query_starts: Tensor  # int32 [S + 1]
    kv_lens: Tensor  # int32 [S]
    block_tables: Tensor  # int32 [S, M]


def look_up(tokens: StepTokens, newest: Tensor, blocks: Tensor, block_size: int) -> Places:
    """Where a step's tokens lie.

    newest int64 [slots + 1]: the token sampled last for each slot; blocks int32 [slots + 1, M]:
    their block tables. The last row of both is spare.
    """
    if uses_triton(blocks):
        from tokenfleet.kernels.gpu import step as gpu

        return gpu.look_up(tokens, newest, blocks, block_size)
    return look_up_reference(tokens, newest, blocks, block_size)


def look_up_reference(
    tokens: StepTokens, newest: Tensor, blocks: Tensor, block_size: int
) -> Places:
    """The specification."""
    spare = blocks.shape[0] - 1
    at = tokens.slots * blocks.shape[1] + tokens.positions // block_size
    owned = blocks.view(-1).index_select(0, at).long()
    kv_slots = owned * block_size + tokens.positions % block_size
    return Places(
        ids=gather_tokens(tokens.ids, newest, tokens.slots, tokens.from_pool != 0),
        kv_slots=kv_slots.masked_fill(tokens.slots == spare, -1),
        query_starts=tokens.starts.int(),
        kv_lens=tokens.ends.int(),
        block_tables=blocks.index_select(0, tokens.sequence_slots),
    )


def settle(
    logits: Tensor,
    hidden: Tensor,
    drawn: Tensor | None,
    is_greedy: Tensor,
    slots: Tensor,
    ends: Tensor,
    newest: Tensor,
    verdicts: Tensor,
) -> None:
    """Write each sequence's token to `verdicts` [S] and to `newest` at its slot.

    logits fp32 [S, V], hidden [S, H]: a NaN or an infinite value in a row of `hidden`, and an
    infinite or a NaN best logit, give the verdict POISONED (`newest` then holds some token). drawn
    int64 [S]: the tokens of rows whose is_greedy is 0; None: all are greedy. A sequence of which
    `ends` is 0 leaves `newest` alone.
    """
    if uses_triton(logits):
        from tokenfleet.kernels.gpu import step as gpu

        gpu.settle(logits, hidden, drawn, is_greedy, slots, ends, newest, verdicts)
    else:
        settle_reference(logits, hidden, drawn, is_greedy, slots, ends, newest, verdicts)


def settle_reference(
    logits: Tensor,
    hidden: Tensor,
    drawn: Tensor | None,
    is_greedy: Tensor,
    slots: Tensor,
    ends: Tensor,
    newest: Tensor,
    verdicts: Tensor,
) -> None:
    """The specification."""
    best, tokens = greedy(logits)
    sound = torch.isfinite(hidden).all(-1) & torch.isfinite(best)
    if drawn is not None:
        tokens = torch.where(is_greedy != 0, tokens, drawn)
    scatter_tokens(tokens, newest, slots.masked_fill(ends == 0, -1))
    verdicts.copy_(tokens.masked_fill(~sound, POISONED))
