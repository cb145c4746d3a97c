"""Tokens that a request forbids: lists of allowed ones, bad words, and what is left when none is.

The reference for bad words is transformers' NoBadWordsLogitsProcessor.
"""

import pytest

from tokenfleet.engine import Engine, EngineConfig, InvalidRequest, SamplingParams

PROMPT = [7, 8, 9, 10, 11, 12]


def make(model, **more):
    config = {"dtype": "float32", "device": "cpu", "num_blocks": 256, "block_size": 8}
    return Engine(EngineConfig(model, **{**config, "max_num_seqs": 8, **more}))


@pytest.fixture(scope="module")
def model(tiny_random):
    return tiny_random("llama")


@pytest.fixture(scope="module")
def engines(model):
    """By whether steps overlap."""
    return {overlap: make(model, overlap=overlap) for overlap in (False, True)}


@pytest.fixture
def engine(engines):
    return engines[False]


def greedy(**more):
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **more})


def expected(reference, model, prompt, words, count=24):
    """Greedy tokens of transformers' model with its own processor."""
    import torch
    from transformers import NoBadWordsLogitsProcessor

    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.tensor([ids])
            ids.append(int(processor(tokens, reference(model)(tokens).logits[:, -1])[0].argmax()))
    return ids[len(prompt) :]


def words_of(said):
    """Words of one to four tokens, each of which would be said."""
    return [said[1:2], said[3:5], said[6:9], said[9:13], [250, 251, *said[2:4]]]


@pytest.mark.parametrize("overlap", [False, True])
def test_bad_words_are_left_out_as_transformers_does_it(model, reference, overlap, engines):
    engine = engines[overlap]
    free = engine.generate([PROMPT], greedy())[0].token_ids
    words = words_of(free)
    # one begins in the prompt
    words.append([*PROMPT[-2:], free[0]])
    outputs = engine.generate([PROMPT] * 3, [greedy(), greedy(bad_words=words), greedy()])
    assert outputs[1].token_ids == expected(reference, model, PROMPT, words) != free
    assert outputs[0].token_ids == outputs[2].token_ids == free
    engine.audit()


def test_no_sampled_output_holds_a_bad_word_whatever_runs_beside_it(engine):
    params = {"temperature": 1.5, "seed": 3, "n": 2, "ignore_eos": True, "max_tokens": 24}
    free = engine.generate([PROMPT], SamplingParams(**params))[0].token_ids
    words = words_of(free)
    limited = SamplingParams(**params, bad_words=words, presence_penalty=0.1)
    (alone,) = engine.generate([PROMPT], limited)
    others = [SamplingParams(**{**params, "seed": seed}) for seed in range(3)]
    beside = engine.generate([PROMPT] * 4, [*others, limited])[3]
    for choice, again in zip(alone.choices, beside.choices, strict=True):
        said = choice.token_ids
        assert said == again.token_ids
        for word in words:
            assert all(said[i : i + len(word)] != word for i in range(len(said)))


def test_a_resumed_output_knows_what_it_said_before(engine):
    free = engine.generate([PROMPT], greedy())[0].token_ids
    words = [free[3:5], free[6:9]]
    whole = engine.generate([PROMPT], greedy(bad_words=words))[0].token_ids
    for done in (4, 7, 8):
        rest = []
        engine.add("again", PROMPT, greedy(bad_words=words), resume=(tuple(whole[:done]),))
        while engine.has_work:
            rest += [token for event in engine.step() for token in event.token_ids]
        assert whole[:done] + rest == whole


def test_a_bad_word_of_text_stands_for_its_tokens_alone_and_behind_a_space(script_model):
    engine = make(script_model([*b"abc", 259, *b"x"], merges=[(" ", "y")]))
    assert engine.generate([[0]], greedy(max_tokens=5))[0].text == "abc yx"
    for word in ("y", " y"):
        assert " y" not in engine.generate([[0]], greedy(max_tokens=5, bad_words=[word]))[0].text
    assert engine.text.in_tokens(SamplingParams(bad_words=["y", [5, 6]])).bad_words == (
        (ord("y"),), (259,), (5, 6),
    )  # fmt: skip
    whole = engine.text.in_tokens(SamplingParams(bad_words=[" to be"]))
    assert whole.bad_words == (tuple(b" to be"),)


def test_only_allowed_tokens_are_chosen_and_they_keep_their_logprobs(engine):
    import torch

    free = engine.generate([PROMPT], greedy(logprobs=20))[0]
    allowed = [3, 99, 200, 258]
    only = greedy(allowed_token_ids=allowed, logprobs=0)
    drawn = SamplingParams(max_tokens=64, seed=1, allowed_token_ids=allowed, ignore_eos=True)
    first, second, third = engine.generate([PROMPT] * 3, [only, greedy(), drawn])
    assert set(first.token_ids) <= set(allowed)
    assert second.token_ids == free.token_ids
    assert set(third.token_ids) <= set(allowed)
    assert len(set(third.token_ids)) > 1
    processed = greedy(
        max_tokens=1, allowed_token_ids=allowed, logprobs=20, logprobs_mode="processed"
    )
    (listed,) = engine.generate([PROMPT], processed)[0].logprobs
    assert set(listed) == set(allowed)
    assert torch.tensor(list(listed.values())).exp().sum() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "impossible",
    [
        {"allowed_token_ids": [5, 6], "bad_words": [[5], [6]]},
        {"allowed_token_ids": [5], "structured_outputs": {"regex": "[a-z]{3}"}},
        {"stop_token_ids": list(range(259)), "min_tokens": 3},
        {"structured_outputs": {"regex": "a{9}"}, "bad_words": [[97, 97, 97]]},
        {"stop_token_ids": [40], "min_tokens": 5, "allowed_token_ids": [40], "top_k": 9},
    ],
)
def test_an_output_that_may_say_nothing_ends_alone_and_says_why(
    engines, overlap, temperature, impossible
):
    engine = engines[overlap]
    plain = SamplingParams(max_tokens=8, temperature=temperature, seed=2, ignore_eos=True)
    alone = engine.generate([PROMPT], plain)[0].token_ids
    stuck = SamplingParams(
        max_tokens=8, temperature=temperature, seed=2, logprobs=3, top_p=0.9, **impossible
    )
    outputs = engine.generate([PROMPT] * 3, [plain, stuck, plain])
    engine.audit()
    assert (outputs[1].finish_reason, outputs[1].error_code) == ("error", "no_token_allowed")
    assert "bad_words" in outputs[1].error
    assert len(outputs[1].token_ids) == (2 if impossible.get("bad_words") == [[97, 97, 97]] else 0)
    assert [outputs[0].token_ids, outputs[2].token_ids] == [alone, alone]
    # its slot and blocks serve others
    assert engine.generate([PROMPT] * 8, plain)[7].token_ids == alone


def test_a_step_that_had_to_be_split_still_says_that_an_output_was_stuck(model):
    engine = make(model)
    failed = []

    def fault(point, work, tensor):
        if point == "forward" and len(work) > 1:
            failed.append(len(work))
            raise RuntimeError("not together")

    engine.core.runner.fault_hook = fault
    stuck = greedy(allowed_token_ids=[5], bad_words=[[5]], prompt_logprobs=0)
    outputs = engine.generate([PROMPT] * 3, [greedy(), stuck, greedy()])
    assert failed
    assert [output.error_code for output in outputs] == [None, "no_token_allowed", None]
    # what was asked about the prompt is known all the same
    listed = outputs[1].prompt_logprobs
    assert [sorted(one or ()) for one in listed] == [[], *([token] for token in PROMPT[1:])]


def test_one_choice_that_is_stuck_leaves_the_others_alone(engine):
    # of the second token some are drawn from which nothing may follow
    allowed = [1, 2]
    params = SamplingParams(
        max_tokens=3, n=8, seed=4, temperature=5.0, ignore_eos=True, allowed_token_ids=allowed,
        bad_words=[[1, 1], [1, 2]],
    )  # fmt: skip
    choices = engine.generate([PROMPT], params)[0].choices
    for choice in choices:
        good = 1 not in choice.token_ids[:2]
        assert choice.finish_reason == ("length" if good else "error")
        assert choice.error_code == (None if good else "no_token_allowed")
    assert {choice.finish_reason for choice in choices} == {"length", "error"}


def test_a_prompt_is_cut_to_its_last_tokens(engine):
    long = list(range(20, 60))
    cut = engine.generate([long], greedy(truncate_prompt_tokens=6, prompt_logprobs=1))[0]
    assert cut.prompt_token_ids == long[-6:]
    assert len(cut.prompt_logprobs) == 6
    assert cut.token_ids == engine.generate([long[-6:]], greedy())[0].token_ids
    beyond = list(range(100)) * 4  # longer than the model takes
    assert engine.generate([beyond], greedy())[0].error_code == "prompt_too_long"
    assert engine.generate([beyond], greedy(truncate_prompt_tokens=9))[0].token_ids
    short = engine.generate([long], greedy(truncate_prompt_tokens=1000))[0]
    assert short.token_ids == engine.generate([long], greedy())[0].token_ids
    assert engine.generate([7], greedy(truncate_prompt_tokens=3))[0].error_code == "bad_prompt"


def test_a_fork_keeps_all_that_was_said_whatever_its_prompt_was_cut_to(engine):
    params = greedy(truncate_prompt_tokens=4, max_tokens=12)
    whole = engine.generate([PROMPT], params)[0].token_ids
    engine.add("trunk", PROMPT, params)
    said = []
    while len(said) < 5:
        said += [token for event in engine.step() for token in event.token_ids]
    engine.fork("trunk", "branch")
    branch = []
    while engine.has_work:
        branch += [t for event in engine.step() for t in event.token_ids if event.id == "branch"]
        engine.audit()
    assert branch[: 12 - len(said)] == whole[len(said) :]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", "12"),
        ("allowed_token_ids", [1.5]),
        ("bad_words", "one"),
        ("bad_words", [""]),
        ("bad_words", [[]]),
        ("bad_words", [5]),
        ("bad_words", [[-1]]),
        ("bad_words", [[1]] * 1025),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", True),
    ],
)
def test_what_cannot_be_forbidden_is_refused_by_its_name(field, value):
    with pytest.raises(InvalidRequest, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.code == "invalid_parameter"


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words"])
def test_tokens_that_the_model_does_not_have_are_refused(engine, field):
    value = [[3, 259]] if field == "bad_words" else [3, 259]
    output = engine.generate([PROMPT], greedy(**{field: value}))[0]
    assert output.error_code == "token_out_of_range"
    assert field in output.error
