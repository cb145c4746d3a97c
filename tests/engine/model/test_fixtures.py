"""The fixtures themselves: what other tests build on."""

import pytest

TEXT = "the cat\n 日本 👩‍👩‍👧\x00"


def test_byte_tokens_are_the_bytes_and_text_comes_back(byte_tokenizer):
    tokenizer = byte_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer) == 259


def test_merges_become_tokens_of_their_own_behind_the_specials(byte_tokenizer):
    tokenizer = byte_tokenizer([("t", "h"), ("th", "e")])
    assert tokenizer("the")["input_ids"] == [260]
    assert tokenizer.decode([260, 257], skip_special_tokens=True) == "the"


def test_the_chat_template_frames_each_turn(byte_tokenizer):
    text = byte_tokenizer().apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<s>user\nHi\n<s>assistant\n"


def test_greedy_output_of_a_script_model_is_its_chain(script_model, driver):
    chain = [*b"Helo", 259, 0xE6, 0x97]
    run = driver(script_model(chain, merges=[("t", "h")]))
    token, out = ord("?"), []
    run.add()
    while token != 257:
        token = run.step({0: [token]})[0][-1].argmax().item()
        out.append(token)
    assert out == [*chain, 257]


def test_a_script_model_leads_by_a_wide_margin(script_model, driver):
    logits = driver(script_model([1, 2])).prefill([1], 1)[0]
    first, second = logits.topk(2).values.tolist()
    assert first - second > 20


def test_a_chain_with_a_repeated_token_is_refused(script_model):
    with pytest.raises(ValueError, match="only once"):
        script_model([1, 2, 1])


def test_the_same_arguments_make_a_tiny_model_once(tiny_random):
    assert tiny_random("llama") == tiny_random("llama")
    assert tiny_random("llama") != tiny_random("llama", num_hidden_layers=2)
