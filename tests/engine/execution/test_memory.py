"""KV blocks come from what the process itself leaves of its share, or a refusal shows the sum."""

import gc
import weakref
from functools import partial

import pytest
import torch

from tokenfleet.engine import ConfigError, EngineConfig, EngineRequest, SamplingParams, WrongState
from tokenfleet.engine.execution import loading
from tokenfleet.engine.execution.loading import pick_num_blocks
from tokenfleet.engine.execution.memory import CONTEXT_BYTES, cuda_room, fitting_blocks
from tokenfleet.engine.execution.weights import moved, num_bytes
from tokenfleet.kernels import linear

GIB = 1 << 30
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[(9 * i + j) % 250 for j in range(2 + 3 * i)] for i in range(4)]


class Card:
    """A card of 80 GiB on which this process holds weights and a neighbour holds the rest."""

    def __init__(self, weights=16 * GIB, step=2 * GIB, others=0):
        self.weights, self.step, self.others = weights, step, others
        self.calls = []

    def total(self):
        self.calls.append("total")
        return 80 * GIB

    def held(self):
        return self.weights

    def peak(self, work):
        self.calls.append("step")
        work()
        return self.weights + self.step

    def free(self):
        self.calls.append("free")
        return 80 * GIB - CONTEXT_BYTES - self.weights - self.others


def room(card, fraction=0.9, graphs=0, step=lambda: None):
    return cuda_room(EngineConfig(".", gpu_memory_fraction=fraction), card, step, graphs)


def blocks(room, per_block=1 << 21, max_len=4096, **config):
    config = EngineConfig(".", **{"max_num_seqs": 256, "max_num_batched_tokens": 512, **config})
    return fitting_blocks(config, room, per_block=per_block, block_size=16, max_len=max_len)


def test_blocks_get_what_weights_step_and_context_leave_of_the_share():
    promised = int(0.9 * 80 * GIB) - (16 + 2) * GIB - CONTEXT_BYTES
    assert room(Card()).promised == promised
    assert blocks(room(Card())) == promised // (1 << 21) - 1
    with_graphs = room(Card(), graphs=10).promised
    assert promised - 3 * GIB < with_graphs < promised - 2 * GIB


def test_a_small_share_works_beside_a_trainer_that_holds_the_rest():
    beside = room(Card(others=50 * GIB), fraction=0.35)
    assert beside.promised == room(Card(), fraction=0.35).promised
    assert blocks(beside) == beside.promised // (1 << 21) - 1 > 4000


@pytest.mark.parametrize("change", [-8 * GIB, 0, 8 * GIB])
def test_a_neighbour_that_allocates_or_frees_during_the_start_does_not_move_the_sum(change):
    card = Card(others=20 * GIB)

    def step():
        card.others += change

    found = room(card, fraction=0.6, step=step)
    assert found.promised == room(Card(), fraction=0.6).promised
    assert found.there == 80 * GIB - CONTEXT_BYTES - (16 + 20 + 2) * GIB - change
    assert blocks(found) == blocks(room(Card(), fraction=0.6))


def test_memory_that_a_neighbour_took_is_a_refusal_with_the_sum():
    with pytest.raises(ConfigError, match="end processes that hold the rest") as caught:
        blocks(room(Card(others=40 * GIB)))
    for figure in ("0.9 of 80.00 GiB is 72.00 GiB", "weights 16.00 GiB", "largest step 2.00 GiB",
                   "CUDA graphs 0.00 GiB", "53.00 GiB", "gpu_memory_fraction"):  # fmt: skip
        assert figure in str(caught.value)
    with pytest.raises(ConfigError, match="10000 KV blocks take 19"):
        blocks(room(Card(others=50 * GIB)), num_blocks=10_000)
    assert blocks(room(Card(others=50 * GIB)), num_blocks=1000) == 1000


def test_a_model_that_does_not_fit_is_a_refusal_with_the_sum():
    with pytest.raises(ConfigError, match="needs 256 KV blocks") as caught:
        blocks(room(Card(), fraction=0.24))
    assert "0.24 of 80.00 GiB is 19.20 GiB, less weights 16.00 GiB" in str(caught.value)
    assert blocks(room(Card(), fraction=0.9), max_len=16, max_num_seqs=4) == 4


def test_the_profiling_run_is_a_step_as_large_as_any(tiny_random, make_core):
    core = make_core(tiny_random("qwen3"))
    card, decoder = Card(weights=0), core.runner.model.decoder
    seen = []
    forward = decoder.forward
    decoder.forward = lambda ids, batch, pools: (
        seen.append(ids.shape[0]) or forward(ids, batch, pools)
    )
    config = EngineConfig(".", max_num_seqs=5, max_num_batched_tokens=30)
    pick_num_blocks(config, decoder, 4, 64, card, 3)
    assert seen[0] == max(seen) == 30  # those after it are small, to have their kernels compiled
    assert card.calls == ["total", "step", "free"]


def test_blocks_beyond_the_machines_memory_are_refused_before_they_are_allocated(tiny_random):
    config = EngineConfig(tiny_random("llama"), device="cpu", num_blocks=10**9)
    with pytest.raises(ConfigError, match=r"1000000000 KV blocks take .* are free .*num_blocks"):
        loading.load_model(config)


@pytest.mark.parametrize("stage", ["load_decoder", "run_largest_step", "PlacedModel"])
def test_memory_that_runs_out_during_the_start_is_a_refusal(stage, tiny_random, monkeypatch):
    def out_of_memory(*_given, **_named):
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr(loading, stage, out_of_memory)
    config = EngineConfig(tiny_random("llama"), dtype="float32", device="cpu", num_blocks=8)
    start = partial(loading.load_model, config)
    if stage == "run_largest_step":
        start = partial(loading.pick_num_blocks, config, None, 4, 64, Card(), 0)
    with pytest.raises(ConfigError, match=r"memory ran out.*2\.00 GiB"):
        start()


def test_sleep_frees_the_blocks_and_wake_goes_on_with_the_same_output(
    tiny_random, make_core, play, recorded
):
    core = make_core(tiny_random("llama", num_hidden_layers=1), recorded)
    expected = play(core, PROMPTS, [GREEDY] * 4)
    blocks = weakref.ref(core.runner.model.pools[0].k)
    hits = core.stats.cache_hits_total
    core.sleep()
    gc.collect()
    assert blocks() is None
    assert core.runner.model.graphs is None
    core.audit()
    core.wake()
    assert play(core, PROMPTS, [GREEDY] * 4) == expected
    assert core.runner.model.graphs is not None
    assert core.stats.cache_hits_total == hits


def test_sleeping_and_waking_at_a_wrong_time_is_refused_and_changes_nothing(tiny_random, make_core):
    core = make_core(tiny_random("llama", num_hidden_layers=1))
    request = EngineRequest("a", [1, 2, 3], GREEDY)
    with pytest.raises(WrongState, match="awake"):
        core.wake()
    core.add(request)
    with pytest.raises(WrongState, match="not ended"):
        core.sleep()
    while core.has_work:
        core.step()
    core.sleep()
    for wrong in (
        core.sleep,
        core.step,
        lambda: core.add(request),
        lambda: core.update_weights({}),
    ):
        with pytest.raises(WrongState, match="sleeps"):
            wrong()
    core.abort("a")
    core.wake()
    core.add(request)
    assert core.has_work


def test_a_step_that_was_launched_for_nobody_does_not_keep_the_engine_awake(
    script_model, make_core, play
):
    core = make_core(script_model([10, 11, 12]), overlap=True)
    core.add(EngineRequest("a", [1], SamplingParams(max_tokens=9, temperature=0.0)))
    while not any(event.finish_reason for event in core.step()):
        pass
    assert core.has_work
    core.sleep()
    core.wake()
    assert not core.has_work


def test_waking_waits_until_a_neighbour_has_given_memory_back(tiny_random, make_core):
    core = make_core(tiny_random("llama", num_hidden_layers=1))
    card = core.runner.model._probe = Card()
    core.sleep()
    card.others = 80 * GIB
    with pytest.raises(ConfigError, match="weights and KV blocks take"):
        core.wake()
    card.others = 0
    core.wake()
    core.audit()


def test_a_wake_that_fails_gives_back_what_it_took_and_may_be_tried_again(
    tiny_random, make_core, play, recorded
):
    core = make_core(tiny_random("llama", num_hidden_layers=1), recorded)
    expected = play(core, PROMPTS, [GREEDY] * 4)
    core.sleep()
    capture, captured = core.runner.model._capture, []

    def runs_out(work):
        captured.append(capture(work))
        if len(captured) == 5:
            raise torch.OutOfMemoryError("injected")
        return captured[-1]

    core.runner.model._capture = runs_out
    with pytest.raises(ConfigError, match="injected"):
        core.wake()
    assert (core.runner.model.pools, core.runner.model.graphs) == ([], None)
    core.wake()
    assert play(core, PROMPTS, [GREEDY] * 4) == expected


def test_nothing_of_the_logits_is_kept_asleep(tiny_random, make_core, play):
    core = make_core(tiny_random("llama", num_hidden_layers=1))
    listed = SamplingParams(max_tokens=3, temperature=0.0, logprobs=1)
    play(core, PROMPTS[:1], [listed])
    kept = weakref.ref(core.runner.sampler._spare)
    core.sleep()
    gc.collect()
    assert kept() is None


def test_weights_that_are_moved_keep_what_they_share(tiny_random, make_core, monkeypatch):
    monkeypatch.setattr(linear, "_onednn_takes", lambda _weight: False)  # as on a GPU
    core = make_core(tiny_random("llama", tie_word_embeddings=True))
    decoder = core.runner.model.decoder
    copy = moved(decoder, torch.Tensor.clone)
    assert copy.lm_head.data is copy.embedding is not decoder.embedding
    assert copy.layers[0].attention.cos_sin is copy.layers[1].attention.cos_sin
    assert torch.equal(copy.layers[1].mlp.down.data, decoder.layers[1].mlp.down.data)
    heads = decoder.lm_head.data.nbytes
    assert num_bytes(copy) == num_bytes(decoder) > heads
