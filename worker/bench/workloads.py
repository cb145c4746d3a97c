"""What the benches run: the same jobs for every engine that is compared, from a seed.

W: N jobs at once, 564 random prompt tokens each and all different, 128 output tokens.
S: 16 jobs at once, 64 prompt tokens, 50 / 120 / 240 / 1024 output tokens, four of each, shuffled: a
batch that waits for its longest job spends most of its time on few rows. Ends of sequence are
ignored, so that everybody makes the same number of tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

W_PROMPT, W_OUTPUT = 564, 128
S_PROMPT, S_OUTPUTS, S_EACH = 64, (50, 120, 240, 1024), 4
FIRST_PLAIN_TOKEN = 256
"""Ids below are special tokens in many vocabularies."""


@dataclass(frozen=True, slots=True)
class BenchJob:
    """A prompt, and how many tokens are made from it."""

    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that are all there at the beginning."""

    name: str
    jobs: tuple[BenchJob, ...]

    @property
    def output_tokens(self) -> int:
        return sum(job.output for job in self.jobs)

    def as_lists(self) -> list[list[object]]:
        """For a child process."""
        return [[list(job.prompt), job.output] for job in self.jobs]


def workload_w(count: int, vocab_size: int, seed: int) -> Workload:
    draw = random.Random(seed)
    jobs = [BenchJob(_prompt(draw, W_PROMPT, vocab_size), W_OUTPUT) for _ in range(count)]
    return Workload(f"W N={count}", tuple(jobs))


def workload_s(vocab_size: int, seed: int) -> Workload:
    draw = random.Random(seed)
    outputs = [output for output in S_OUTPUTS for _ in range(S_EACH)]
    random.Random(0).shuffle(outputs)  # the same order in every run
    return Workload(
        "S", tuple(BenchJob(_prompt(draw, S_PROMPT, vocab_size), output) for output in outputs)
    )


def warm_up(vocab_size: int) -> Workload:
    """A little of both shapes, not counted: first calls allocate and choose kernels."""
    draw = random.Random(0)
    return Workload(
        "warm-up", tuple(BenchJob(_prompt(draw, W_PROMPT, vocab_size), 8) for _ in range(4))
    )


def _prompt(draw: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    low = min(FIRST_PLAIN_TOKEN, vocab_size // 2)
    return tuple(draw.randrange(low, vocab_size) for _ in range(length))
