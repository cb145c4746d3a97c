"""The real model: SmolLM2-135M-Instruct, greedy, fp32, against transformers.

transformers is asked once per prompt, for the logits of prompt and output together: the output is
what its `generate` gives exactly when every token is the best one given the tokens before it.
"""

import pytest
import torch

from tokenfleet.engine import Engine, EngineConfig, SamplingParams

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.timeout(600),
]

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Count from 1 to 20.",
    "Explain photosynthesis to a child.",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet, and when?",
    "Translate 'good morning' to Spanish.",
    "What is 12 * 12?",
    "List three uses of a paperclip.",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Tell me a short story about a fox.",
    "What are the primary colours?",
    "How do I boil an egg?",
    "Name five planets.",
    "What is machine learning?",
    "Summarise the plot of Cinderella in two sentences.",
    "What year did the Second World War end?",
    "Give two synonyms for 'happy'.",
    "Describe the taste of an orange.",
]
TIE = 1e-3
"""Where transformers' two best logits are this close, either may be taken."""


@pytest.fixture(scope="module")
def engine(smollm2_engine):
    return smollm2_engine


@pytest.fixture(scope="module")
def reference(smollm2):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def differences(reference, prompt, output):
    """(index, gap of the two best logits) where the output is not transformers' best token."""
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = reference(ids).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2)
    taken = torch.tensor(output)
    wrong = (best.indices[:, 0] != taken).nonzero()[:, 0].tolist()
    gaps = (best.values[:, 0] - logits.gather(1, taken[:, None])[:, 0]).tolist()
    return [(i, gaps[i]) for i in wrong]


def test_twenty_chats_in_flight_together_are_transformers_greedy(engine, reference):
    prompts = [engine.text.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0))
    engine.audit()
    places = {}
    for question, prompt, output in zip(QUESTIONS, prompts, outputs, strict=True):
        assert len(output.token_ids) == 64 or output.finish_reason == "stop"
        for index, gap in differences(reference, prompt, output.token_ids):
            places[question, index] = gap
    print("places where transformers' own two best are close:", places)
    assert all(gap < TIE for gap in places.values())


def test_a_shared_system_prompt_is_computed_once(engine):
    system = " ".join(f"Rule {i}: answer question number {i} politely." for i in range(100))
    tails = [f"Question {i}?" for i in range(64)]
    base = engine.text.encode(system)[:1000]
    prompts = [base + engine.text.encode(tail) for tail in tails]
    params = SamplingParams(max_tokens=2, temperature=0.0)
    first = engine.generate(prompts[:1], params)
    before = engine.stats.prefill_tokens_total
    rest = engine.generate(prompts[1:], params)
    computed = engine.stats.prefill_tokens_total - before
    given = sum(len(prompt) for prompt in prompts[1:])
    print(f"computed {computed} of {given} prompt tokens")
    assert computed < 0.1 * given
    plain = Engine(
        EngineConfig(engine.core.config.model, dtype="float32", prefix_cache=False, num_blocks=256,
                     max_num_seqs=4, max_model_len=2048)
    )  # fmt: skip
    assert plain.generate([prompts[40]], params)[0].text == (first + rest)[40].text


def test_sixteen_rollouts_share_the_prompts_blocks(engine):
    prompt = engine.text.encode("Tell me something new. " * 120)[:500]
    params = SamplingParams(max_tokens=3, n=16, seed=1, ignore_eos=True)
    engine.add("rollouts", prompt, params)
    used = 0
    while engine.has_work:
        engine.step()
        if engine.stats.running == 16 and not used:
            used = engine.stats.blocks_used
            separate = engine.stats.blocks_needed
    print(f"{used} blocks in use, {separate} for separate sequences")
    assert used < separate / 4
