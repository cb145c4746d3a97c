"""What one step did, in numbers. The engine reports; it makes no metrics and no spans."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepStats:
    """Figures of the last step, and counts since the start where the name says total."""

    step: int = 0
    """Steps since the start."""
    running: int = 0
    waiting: int = 0
    scheduled_tokens: int = 0
    """Tokens computed in this step."""
    decode_tokens: int = 0
    """How many of them were the one next token of a sequence."""
    prefill_tokens_total: int = 0
    """Prompt (and recomputed) tokens computed since the start."""
    decode_tokens_total: int = 0
    preemptions_total: int = 0
    blocks_used: int = 0
    """Blocks referenced by a sequence."""
    blocks_cached: int = 0
    """Free blocks that still hold a known prefix."""
    blocks_total: int = 0
    cache_queries_total: int = 0
    """Tokens looked up in the prefix cache."""
    cache_hits_total: int = 0
    """Tokens found there."""
    blocks_needed: int = 0
    """Blocks that the tokens present would fill, rounded up per sequence, nothing shared."""
    step_s: float = 0.0
    """Wall time of the step."""
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    schedule_s_total: float = 0.0
    """The same since the start; a step's rest is input building and bookkeeping."""
    forward_s_total: float = 0.0
    sample_s_total: float = 0.0
    step_s_total: float = 0.0
    read_bytes_total: int = 0
    """Weights and KV that the steps had to read at least (traffic.py)."""
    errors_total: int = 0
    """Sequences that ended in an error."""
    oom_retries_total: int = 0
    preempted_ids: list[str] = field(default_factory=list)
    """Requests that lost their blocks in this step."""
