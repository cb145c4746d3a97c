"""What the scheduler decided for one step; read by the batch builder, changed by nobody else."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenfleet.engine.scheduling.sequence import Sequence


@dataclass(slots=True, eq=False)
class Chunk:
    """`count` tokens of one sequence, from position `start`; made for each sequence in each step,
    so it is not frozen, which takes three times as long."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """Whether its last token's logits give the next token."""


@dataclass(slots=True)
class StepPlan:
    """One step's work."""

    decodes: list[Chunk] = field(default_factory=list)
    """Chunks of exactly one token; they come first in the batch."""
    chunks: list[Chunk] = field(default_factory=list)
    """Longer ones."""
    admitted: list[Sequence] = field(default_factory=list)
    """Got a slot in this step: the batch copies tokens, table and parameters into its row."""
    grown: list[tuple[Sequence, int]] = field(default_factory=list)
    """Block table changed from this index on."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) blocks to copy before the forward pass; all are read before any is written."""
    preempted: list[Sequence] = field(default_factory=list)
    starved: bool = False
    """Blocks ran out while another step is in flight: nothing was preempted, and somebody waits
    until no step is."""
    num_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_tokens)

    @property
    def work(self) -> list[Chunk]:
        """All chunks in batch order."""
        return self.decodes + self.chunks if self.chunks else self.decodes

    def drop(self, victim: Sequence) -> None:
        """Take out the work of a sequence that was preempted while the plan was made."""
        dropped = [chunk for chunk in self.work if chunk.sequence is victim]
        for chunk in dropped:
            (self.decodes if chunk.count == 1 else self.chunks).remove(chunk)
            self.num_tokens -= chunk.count
            victim.num_computed -= chunk.count
            victim.num_known -= chunk.samples
        own = set(victim.block_table)
        self.grown = [entry for entry in self.grown if entry[0] is not victim]
        self.copies = [pair for pair in self.copies if pair[1] not in own]
