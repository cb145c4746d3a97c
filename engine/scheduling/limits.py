"""What one step may take, and the unit in which memory is counted."""

from __future__ import annotations

from dataclasses import dataclass

from tokenfleet.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may take."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_chunk_tokens: int | None = None

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-tokens // self.block_size)

    @property
    def long_prompt(self) -> int:
        """A prompt that misses more than this leaves half of the budget to others that wait."""
        return 4 * self.max_num_batched_tokens


def limits_of(config: EngineConfig, block_size: int) -> Limits:
    """The limits that a config means."""
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=block_size,
        max_chunk_tokens=config.max_chunk_tokens,
    )
