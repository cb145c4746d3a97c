"""What a captured step launches is counted from the engine; the page about it says the same."""

from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "ops" / "bench"

pytest.importorskip("triton", reason="the launches are those of Triton kernels")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import step_launches

    return step_launches


def test_a_layer_is_six_launches_for_one_sequence_and_nine_for_many(script):
    fields = script.MODELS["Llama-8B"]
    (one, two), (many, more) = (
        [script.counted(fields | {"num_hidden_layers": n}, sequences) for n in (1, 2)]
        for sequences in (1, 32)
    )
    assert two.launches - one.launches == 6
    assert more.launches - many.launches == 9
    assert two.drawn.total() - two.greedy.total() == 21


def test_the_page_has_the_table_that_the_script_makes(script, monkeypatch):
    monkeypatch.setattr(script, "MODELS", {"SmolLM2-135M": script.MODELS["SmolLM2-135M"]})
    page = (BENCH / "gpu-step.md").read_text().splitlines()
    for line in script.lines():
        assert line in page
