"""What a step reads, in bytes, against the sizes that a checkpoint's shapes give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokenfleet.engine.traffic import ExpertBytes, KVBytes, Traffic


def plan(*chunks: tuple[int, int]) -> Any:
    """A step of (start, count) chunks."""
    work = [SimpleNamespace(start=start, count=count) for start, count in chunks]

    class Plan(SimpleNamespace):
        def __bool__(self) -> bool:
            return bool(self.work)

    return Plan(work=work, num_tokens=sum(count for _, count in chunks))


def test_a_step_reads_the_weights_once_and_each_sequence_its_cache() -> None:
    traffic = Traffic(weight_bytes=1000, kv=(KVBytes(10, None),))
    assert traffic.of(plan((7, 1))) == 1000 + 80
    assert traffic.of(plan((7, 1), (0, 4))) == 1000 + 80 + 40
    assert traffic.of(plan()) == 0


def test_a_sliding_layer_reads_no_further_back_than_its_window() -> None:
    kv = KVBytes(10, window=4)
    assert kv.read(start=2, count=1) == 30
    assert kv.read(start=100, count=1) == 40
    assert kv.read(start=100, count=3) == 60


def test_one_token_reads_its_experts_and_many_tokens_read_all() -> None:
    experts = ExpertBytes(800, num_experts=8, top_k=2)
    assert experts.read(1) == pytest.approx(200)
    assert experts.read(1000) == pytest.approx(800)


@pytest.mark.parametrize(("family", "experts"), [("llama", False), ("mixtral", True)])
def test_an_engine_counts_what_its_steps_read(tiny_random: Any, family: str, experts: bool) -> None:
    from tokenfleet.engine import Engine, EngineConfig, SamplingParams

    config = EngineConfig(
        tiny_random(family), max_num_seqs=2, max_num_batched_tokens=32, block_size=8,
        num_blocks=32, dtype="float32", device="cpu",
    )  # fmt: skip
    engine = Engine(config)
    engine.generate([[1] * 12], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    decoder, stats = engine.core.runner.model.decoder, engine.stats
    spec = decoder.spec
    hidden, q, kv = spec.hidden_size, spec.num_q_heads, spec.num_kv_heads
    attention = hidden * spec.head_dim * (2 * q + 2 * kv) * 4 * spec.num_layers
    per_token = 2 * kv * spec.head_dim * 4 * spec.num_layers
    read = [12, 13, 14, 15]  # the prompt's step, then three that decode
    cached = per_token * sum(read)
    least = len(read) * (attention + spec.vocab_size * hidden * 4) + cached
    assert stats.step == len(read)
    assert stats.read_bytes_total > least
    assert bool(engine.core._reporter._traffic.experts) is experts
    if not experts:
        mlp = 3 * hidden * spec.layers[0].intermediate_size * 4 * spec.num_layers
        assert stats.read_bytes_total == least + len(read) * mlp
    parts = stats.schedule_s_total + stats.forward_s_total + stats.sample_s_total
    assert 0 < parts <= stats.step_s_total
