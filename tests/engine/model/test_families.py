"""Each family against transformers, on random weights in float32: logits within 1e-4."""

import pytest
import torch

PROMPT = torch.randint(0, 256, (29,), generator=torch.Generator().manual_seed(7)).tolist()
TOLERANCE = 1e-4
FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "smollm3", "gemma2",
    "gemma3_text", "phi3", "olmo2", "olmo3", "granite",
]  # fmt: skip


def expected(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def assert_close(actual, wanted):
    torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=0)


def test_every_family_of_the_engine_is_tested(families):
    from tokenfleet.engine.model.families import FAMILIES as READERS

    assert sorted(READERS) == sorted(families) == sorted(FAMILIES)


@pytest.mark.parametrize("chunk", [1, 3, 16, len(PROMPT)])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_chunks_gives_transformers_logits(tiny_random, reference, driver, family, chunk):
    path = tiny_random(family)
    assert_close(driver(path).prefill(PROMPT, chunk), expected(reference(path), PROMPT))


@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_and_chunks_in_one_step_do_not_disturb_each_other(
    tiny_random, reference, driver, family
):
    path = tiny_random(family)
    run, model = driver(path), reference(path)
    texts = [PROMPT[:11], PROMPT[3:29], PROMPT[::-1]]
    run.add(3)
    seen = {0: [run.step({0: texts[0][:10]})[0]], 1: [run.step({1: texts[1][:20]})[1]], 2: []}
    for step in ({0: texts[0][10:], 1: texts[1][20:21], 2: texts[2][:13]},
                 {1: texts[1][21:22], 2: texts[2][13:29]},
                 {1: texts[1][22:]}):  # fmt: skip
        for s, logits in run.step(step).items():
            seen[s].append(logits)
    for s, text in enumerate(texts):
        assert_close(torch.cat(seen[s]), expected(model, text))
