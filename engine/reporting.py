"""Writes the figures of each step down, once it is over. It changes nothing that it looks at."""

from __future__ import annotations

import time

from tokenfleet.engine.execution.flight import Timing
from tokenfleet.engine.scheduling.plan import StepPlan
from tokenfleet.engine.scheduling.scheduler import Scheduler
from tokenfleet.engine.stats import StepStats
from tokenfleet.engine.traffic import Traffic


class Reporter:
    """Keeps `stats`.

    Args:
        traffic: what a step reads.
    """

    def __init__(self, stats: StepStats, scheduler: Scheduler, traffic: Traffic) -> None:
        self.stats = stats
        self._scheduler = scheduler
        self._traffic = traffic

    def step(
        self, plan: StepPlan, timing: Timing, *, started: float, scheduled: float, num_errors: int
    ) -> None:
        """A step is over that began at `started` and had its plan at `scheduled` (perf_counter)."""
        stats = self.stats
        self._count(plan)
        self._look()
        stats.errors_total = num_errors
        stats.oom_retries_total += timing.out_of_memory
        stats.schedule_s = scheduled - started
        stats.forward_s = timing.forward_s
        stats.sample_s = timing.sample_s
        stats.step_s = time.perf_counter() - started
        if plan:
            stats.read_bytes_total += self._traffic.of(plan)
            stats.schedule_s_total += stats.schedule_s
            stats.forward_s_total += stats.forward_s
            stats.sample_s_total += stats.sample_s
            stats.step_s_total += stats.step_s

    def _count(self, plan: StepPlan) -> None:
        stats = self.stats
        decodes = sum([chunk.start >= chunk.sequence.num_prompt for chunk in plan.decodes])
        stats.step += bool(plan)
        stats.scheduled_tokens = plan.num_tokens
        stats.decode_tokens = decodes
        stats.decode_tokens_total += decodes
        stats.prefill_tokens_total += plan.num_tokens - decodes
        stats.preempted_ids = [sequence.request_id for sequence in plan.preempted]

    def _look(self) -> None:
        """What the scheduler has to say."""
        scheduler, stats = self._scheduler, self.stats
        stats.running = len(scheduler.running)
        stats.waiting = scheduler.waiting.num_waiting + scheduler.waiting.num_held
        stats.preemptions_total = scheduler.preemptions
        stats.blocks_used = scheduler.pool.num_used
        stats.blocks_cached = scheduler.pool.num_cached
        stats.blocks_needed = scheduler.num_needed_blocks
        stats.cache_queries_total = scheduler.cache_queries
        stats.cache_hits_total = scheduler.cache_hits
