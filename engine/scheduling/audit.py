"""What must hold of blocks, slots and tables whenever no step is running."""

from __future__ import annotations

from tokenfleet.engine.scheduling.scheduler import Scheduler
from tokenfleet.engine.scheduling.sequence import Sequence, SequenceState


def scheduler_faults(scheduler: Scheduler) -> list[str]:
    """What contradicts itself in blocks, slots, tables and counts."""
    owners = [*scheduler.running, *scheduler.limbo]
    found = scheduler.pool.faults(sequence.block_table for sequence in owners)
    slots = sorted([sequence.slot for sequence in owners] + scheduler.free_slots)
    if slots != list(range(scheduler.limits.max_num_seqs)):
        found.append(f"slots owned and free are {slots}")
    waiting = sum(1 for _ in scheduler.waiting)
    if waiting != scheduler.waiting.num_waiting:
        found.append(f"{waiting} wait, {scheduler.waiting.num_waiting} are counted")
    for sequence in scheduler.running:
        found += _faults_of(scheduler, sequence)
    return found + (scheduler.cache.faults() if scheduler.cache is not None else [])


def ownership_faults(scheduler: Scheduler, owned: set[Sequence]) -> list[str]:
    """What contradicts itself between the scheduler and the requests that own these sequences."""
    placed = {*scheduler.running, *scheduler.waiting}
    held = {child for sequence in owned for child in sequence.children}
    lost = [s for s in owned - placed - held if s.state is not SequenceState.FINISHED]
    found = [f"{s.request_id}/{s.choice} is open and nowhere" for s in lost]
    orphans = [s for s in scheduler.running if s not in owned]
    found += [f"{s.request_id}/{s.choice} runs and no request owns it" for s in orphans]
    if not owned and not scheduler.steps_in_flight and scheduler.pool.num_used:
        found.append(f"idle, and {scheduler.pool.num_used} blocks are owned")
    return found


def _wrong_owner(scheduler: Scheduler, sequence: Sequence, name: str) -> list[str]:
    """Blocks that would be written to and are not there, or somebody else's too."""
    size, table = scheduler.limits.block_size, sequence.block_table
    if sequence.num_owned <= sequence.num_computed:
        return []
    if sequence.num_owned > len(table) * size:
        return [f"{name} owns {sequence.num_owned} tokens in {len(table)} blocks"]
    tail = table[sequence.num_computed // size :]
    return [
        f"{name} would write to block {b}, a shared one" for b in tail if scheduler.pool.refs(b) > 1
    ]


def _faults_of(scheduler: Scheduler, sequence: Sequence) -> list[str]:
    name = f"sequence {sequence.request_id}/{sequence.choice}"
    found = []
    if sequence.state is not SequenceState.RUNNING:
        found.append(f"{name} is {sequence.state.value} and in the running batch")
    if not sequence.num_done <= sequence.num_computed < sequence.num_known:
        found.append(f"{name}: done, computed, known are out of order, or nothing is left to do")
    sampled = sequence.num_known - len(sequence.tokens)
    if not 0 <= sampled <= scheduler.steps_in_flight:
        found.append(f"{name}: {sampled} tokens are being sampled")
    if len(sequence.block_table) != scheduler.limits.blocks_for(sequence.num_computed):
        found.append(
            f"{name}: {len(sequence.block_table)} blocks for {sequence.num_computed} tokens"
        )
    if 0 in sequence.block_table:
        found.append(f"{name} has the null block in its table")
    found += _wrong_owner(scheduler, sequence, name)
    return found
