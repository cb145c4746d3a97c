"""What one step takes in, shares, waits for and wastes."""

from tokenfleet.engine import EngineRequest, SamplingParams


def test_freed_slot_is_filled_in_the_next_step(world):
    core, model = world.start(100, 4, 64, 2, None, prefix_cache=False)
    history = world.History(core, model)
    for length in (1, 5, 5):
        history.add([1, 2, 3], SamplingParams(max_tokens=length, seed=3, ignore_eos=True))
    history.step()
    assert history.ends == {("r0", 0): "length"}
    history.step()
    assert core.stats.running == 2
    assert len(history.outputs["r2", 0]) == 1


def test_a_decode_never_waits_for_a_prompt(world):
    core, model = world.start(100, 4, 8, 4, None, prefix_cache=False)
    history = world.History(core, model)
    history.add([1], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    history.step()
    history.add([2] * 30, SamplingParams(max_tokens=1, seed=1))
    history.add([3] * 30, SamplingParams(max_tokens=1, seed=1))
    for made in range(2, 12):
        history.step()
        assert len(history.outputs["r0", 0]) == made


def test_a_huge_prompt_leaves_half_of_the_budget_to_short_ones(world):
    core, model = world.start(400, 4, 4, 4, None, prefix_cache=False)
    history = world.History(core, model)
    history.add([1] * 39, SamplingParams(max_tokens=1, seed=1, ignore_eos=True))
    history.add([2, 2], SamplingParams(max_tokens=1, seed=1, ignore_eos=True))
    history.step()
    assert ("r1", 0) in history.ends


def test_a_prompt_that_fits_the_next_step_is_not_cut_to_fill_this_one(world):
    core, model = world.start(400, 4, 20, 8, None, prefix_cache=False)
    history = world.History(core, model)
    for length in (4, 8, 12, 12, 12):
        history.add([1] * length, SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    seen = []
    while len(seen) < 4:
        history.step()
        seen.append([len(history.outputs[f"r{number}", 0]) for number in range(5)])
    # 12 + two decodes (of 20), then 12 + three, then 12 + four: nobody's first token comes later
    assert seen == [[1, 1, 0, 0, 0], [2, 2, 1, 0, 0], [3, 3, 2, 1, 0], [4, 4, 3, 2, 1]]
    assert core.stats.running == 5
    history.drain()
    history.check()


def test_a_prompt_that_fits_no_step_and_a_step_less_than_half_full_are_cut_and_filled(world):
    for lengths, computed in (([12, 30], 20), ([8, 18], 20), ([12, 18], 12)):
        core, model = world.start(400, 4, 20, 8, None, prefix_cache=False)
        history = world.History(core, model)
        for length in lengths:
            history.add([1] * length, SamplingParams(max_tokens=2, seed=1))
        assert core.scheduler.schedule().num_tokens == computed


def test_samples_share_the_prompts_blocks_and_copy_only_the_last(world):
    core, model = world.start(400, 4, 64, 16, None, prefix_cache=True)
    history = world.History(core, model)
    history.add([1] * 30, SamplingParams(max_tokens=4, n=16, seed=1, ignore_eos=True))
    history.step()
    history.step()
    assert core.stats.running == 16
    assert core.scheduler.pool.num_used <= 8 + 15 + 16
    history.drain()
    history.check()


def test_a_full_prefix_hit_still_computes_the_last_token(world):
    for prompt in ([1, 2, 3, 1] * 4, ([1, 2, 3, 1] * 4)[:-1], [1, 2, 3, 1] * 4 + [2]):
        core, model = world.start(400, 4, 64, 4, None, prefix_cache=True)
        history = world.History(core, model)
        for _ in range(3):
            history.add(prompt, SamplingParams(max_tokens=3, seed=1))
            history.drain()
        history.check()
        assert core.stats.cache_hits_total > 0


def test_a_salt_keeps_prefixes_apart(world):
    core, model = world.start(400, 4, 64, 4, None, prefix_cache=True)
    history = world.History(core, model)
    for salt in ("a", "b"):
        history.add([1] * 20, SamplingParams(max_tokens=2, seed=1), salt=salt)
        history.drain()
    assert core.stats.cache_hits_total == 0
    history.add([1] * 20, SamplingParams(max_tokens=2, seed=1), salt="a")
    history.drain()
    assert core.stats.cache_hits_total == 16


def test_a_step_costs_the_same_however_many_wait(world):
    core, _ = world.start(100, 4, 64, 2, None, prefix_cache=True)
    for i in range(2000):
        core.add(EngineRequest(f"w{i}", [i % 4] * 13, SamplingParams(max_tokens=3, seed=1)))
    touched = 0

    class Counting(dict):
        def get(self, *args):
            nonlocal touched
            touched += 1
            return super().get(*args)

    core.cache._node_of = Counting(core.cache._node_of)
    for _ in range(5):
        core.step()
    assert touched < 100


def test_the_next_step_is_launched_before_the_last_one_is_settled(world):
    history = world.overlapping()
    history.add([1, 2, 3], SamplingParams(max_tokens=6, seed=3, ignore_eos=True))
    history.step()
    assert history.outputs["r0", 0] == []
    for made in range(1, 6):
        history.step()
        assert len(history.outputs["r0", 0]) == made
        assert len(history.model.queue) == 1
    history.drain()
    history.check()
    assert history.model.most_in_flight == 2


def test_blocks_and_slot_of_an_aborted_sequence_return_only_after_the_step_that_writes_to_them(
    world,
):
    history = world.overlapping(num_blocks=10, slots=1)
    history.add([1] * 20, SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    history.step()
    history.abort(0, whole=True)
    history.add([2] * 20, SamplingParams(max_tokens=1, seed=1, ignore_eos=True))
    pool, scheduler = history.core.scheduler.pool, history.core.scheduler
    assert (pool.num_used, scheduler.free_slots) == (5, [])
    history.step()
    assert history.ends == {("r0", 0): "cancelled"}
    assert (pool.num_used, scheduler.free_slots) == (0, [0])
    history.drain()
    history.check()


def test_a_late_seen_end_wastes_one_token_that_nobody_gets(world):
    seed = next(
        s
        for s in range(99)
        if world.EOS in world.alone([1], SamplingParams(max_tokens=9, seed=s), 0)
    )
    history = world.overlapping()
    history.add([1], SamplingParams(max_tokens=30, seed=seed))
    history.drain()
    history.check()
    made = len(history.outputs["r0", 0])
    assert history.core.stats.prefill_tokens_total + history.core.stats.decode_tokens_total == (
        1 + made
    )


def test_an_end_by_length_wastes_nothing(world):
    history = world.overlapping()
    history.add([1], SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
    history.drain()
    assert history.core.stats.decode_tokens_total == 4


def test_a_constrained_sequence_waits_for_its_token_and_nobody_else_does(world):
    history = world.overlapping()
    grammar = {"regex": "3"}
    history.add([1], SamplingParams(max_tokens=9, seed=1, structured_outputs=grammar))
    history.add([2], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    for _ in range(5):
        history.step()
    assert len(history.outputs["r1", 0]) == 4
    assert len(history.outputs["r0", 0]) == 2
    history.drain()
    history.check()


def test_a_starved_step_settles_everything_before_it_preempts(world):
    history = world.overlapping(num_blocks=15)
    for i in range(6):
        history.add([i % 3] * 8, SamplingParams(max_tokens=30, seed=i, ignore_eos=True))
    history.drain()
    history.check()
    assert history.core.stats.preemptions_total > 0
    assert history.model.most_in_flight == 2
