"""Log probabilities of a prompt need memory for some of its rows, not for all of them."""

from __future__ import annotations

import pytest

from tokenfleet.engine import Engine, EngineConfig, SamplingParams
from tokenfleet.engine.execution import prompt_logprobs
from tokenfleet.engine.model.decoder import Decoder


def test_of_a_long_prompt_few_rows_of_logits_exist_at_once(tiny_random, monkeypatch):
    rows: list[int] = []
    logits = Decoder.logits

    def noted(decoder, hidden):
        rows.append(hidden.shape[0])
        return logits(decoder, hidden)

    prompt = [(7 * i) % 250 for i in range(3 * prompt_logprobs.ROWS + 5)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    path, reports = tiny_random("llama"), []
    for most in (prompt_logprobs.ROWS, len(prompt)):
        monkeypatch.setattr(prompt_logprobs, "ROWS", most)
        engine = Engine(
            EngineConfig(path, dtype="float32", device="cpu", max_num_batched_tokens=512)
        )
        monkeypatch.setattr(Decoder, "logits", noted)
        rows.clear()
        reports.append(engine.generate([prompt], params)[0].prompt_logprobs)
        monkeypatch.setattr(Decoder, "logits", logits)
        assert max(rows) == min(most, len(prompt) - 1), "as many as may be, and no more"
    for report, whole in zip(*reports, strict=True):
        assert report == (None if whole is None else pytest.approx(whole, abs=1e-5))
