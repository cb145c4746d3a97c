"""A captured step gives what a launched one gives, and touches nothing else."""

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenfleet.engine import EngineConfig, EngineRequest, SamplingParams
from tokenfleet.engine.execution.buckets import decode_buckets, mixed_buckets
from tokenfleet.engine.execution.capture import HostRead, RecordedCapture
from tokenfleet.engine.execution.step_words import StepWords

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, temperature=0.8, top_k=40, top_p=0.9, seed=4, ignore_eos=True)
PENALISED = SamplingParams(max_tokens=6, seed=4, repetition_penalty=1.3, ignore_eos=True)
PROMPTS = [[(9 * i + j) % 250 for j in range(2 + 3 * i)] for i in range(9)]


class Counting(RecordedCapture):
    """Counts replays."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, work):
        replay = super().__call__(work)
        self.captured += 1

        def counted():
            self.replayed += 1
            replay()

        return counted


@pytest.fixture(scope="module")
def path(tiny_random):
    return tiny_random("llama", num_hidden_layers=1)


def watch(core):
    """Check at each launch that only blocks of the step's own sequences change."""
    launch, pools = core.runner.launch, core.runner.model.pools

    def bits():
        return torch.stack([side.clone().view(torch.int32) for p in pools for side in (p.k, p.v)])

    def watched(plan):
        before = bits()
        flight = launch(plan)
        changed = (bits() != before).flatten(2).any(-1).any(0).nonzero()[:, 0].tolist()
        owned = {block for chunk in plan.work for block in chunk.sequence.block_table}
        assert set(changed) <= owned
        return flight

    core.runner.launch = watched


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_batches_around_each_bucket_equal_eager_and_leave_other_blocks_alone(
    params, path, make_core, play
):
    eager, capture = make_core(path), Counting()
    graphed = make_core(path, capture)
    watch(graphed)
    assert capture.captured == 3 * len(decode_buckets(9) + mixed_buckets(40, 9))
    for count in range(1, 10):
        before = capture.replayed
        expected = play(eager, PROMPTS[:count], [params] * count)
        assert play(graphed, PROMPTS[:count], [params] * count) == expected
        assert capture.replayed > before + 2 * (params.max_tokens - 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_kind_of_row_is_sampled_as_without_graphs(overlap, path, make_core, play, recorded):
    params = [GREEDY, DRAWN, PENALISED] * 3
    known = [i for i in range(259) if i != 77]
    expected = play(make_core(path, known=known), PROMPTS, params)
    graphed = make_core(path, recorded, known=known, overlap=overlap, prefix_cache=False)
    assert play(graphed, PROMPTS, params) == expected
    assert play(graphed, PROMPTS[::-1], params[::-1]) == expected[::-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"num_blocks": 17, "overlap": True},
        {"max_num_batched_tokens": 200, "max_chunk_tokens": 5},
        {"block_size": 16},
    ],
    ids=str,
)
def test_graphs_do_not_depend_on_budget_blocks_or_preemption(
    changes, path, make_core, play, recorded
):
    params = [GREEDY, DRAWN, PENALISED] * 3
    core = make_core(path, recorded, **changes)
    watch(core)
    assert play(core, PROMPTS, params) == play(make_core(path), PROMPTS, params)


@pytest.mark.parametrize("chunk", [1, 3])
def test_prompt_tokens_are_listed_as_without_graphs_however_a_prompt_is_cut(
    chunk, path, make_core, recorded
):
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2)
    found = []
    for capture in (None, recorded):
        core = make_core(path, capture, max_chunk_tokens=chunk)
        core.add(EngineRequest("1", [3, 4, 5, 6, 7, 8], params))
        core.add(EngineRequest("2", [9, 8, 7], GREEDY))
        events = [event for _ in range(12) for event in core.step() if event.id == "1"]
        found.append([(event.token_ids, event.prompt_logprobs) for event in events])
    assert found[0] == found[1]
    assert [listed is None for listed in found[1][0][1]] == [True] + [False] * 5


def test_no_tensor_of_a_graph_is_rebound(path, make_core, play, recorded):
    core = make_core(path, recorded)
    graphs = core.runner.model.graphs

    def addresses():
        words = [replays.words.data for replays in graphs._replays.values()]
        fixed = [graphs.hidden, graphs.last_ids, graphs.verdicts, graphs.tables.blocks]
        pools = [side for pool in core.runner.model.pools for side in (pool.k, pool.v)]
        return [t.data_ptr() for t in [*words, *fixed, *pools, core.runner.model.newest]]

    before = addresses()
    play(core, PROMPTS, [GREEDY, DRAWN, PENALISED] * 3)
    assert addresses() == before


def test_no_filter_is_looked_for_in_rows_of_padding(path, make_core, recorded):
    """A search reads a row's logits many times, and a mixed step has mostly rows of padding."""
    graphs = make_core(path, recorded).runner.model.graphs
    for bucket, replays in graphs._replays.items():
        words = StepWords(bucket, torch.device("cpu"))
        words.data.copy_(torch.from_numpy(replays.inputs.padding))
        rows = words.sampling_rows()
        assert bool((rows.top_k >= 259).all())
        assert (rows.top_p.unique().tolist(), rows.min_p.unique().tolist()) == ([1.0], [0.0])
        assert bool((words.greedy == 1).all())


def test_nothing_is_allocated_for_a_replayed_step(path, make_core, play, recorded):
    core = make_core(path, recorded)
    play(core, PROMPTS, [DRAWN] * 9)
    graphs, made = core.runner.model.graphs, []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            old = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in old:
                made.append(str(func))
            return result

    fill, forward, sample = graphs.fill, graphs.forward, graphs.sample
    steps = 0

    def watched_fill(*given):
        nonlocal steps
        steps += 1
        with Allocations():
            return fill(*given)

    def watched_forward(bucket):
        with Allocations():
            forward(bucket)

    def watched_sample(bucket, *, drawn):
        with Allocations():
            sample(bucket, drawn=drawn)

    graphs.fill, graphs.forward, graphs.sample = watched_fill, watched_forward, watched_sample
    play(core, PROMPTS, [DRAWN] * 9)
    assert steps > 5
    assert made == []


def test_an_out_of_memory_in_a_replayed_step_is_contained(path, make_core, play, recorded):
    expected = play(make_core(path), PROMPTS, [GREEDY] * 9)
    core = make_core(path, recorded)
    left = [5]

    def fail(point, work, _hidden):
        if point == "forward" and len(work) > 2 and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("injected")

    core.runner.fault_hook = fail
    assert play(core, PROMPTS, [GREEDY] * 9) == expected
    assert left == [0]


@pytest.mark.parametrize("graphed", [False, True])
def test_a_step_that_fails_after_sampling_is_tried_again_from_the_same_tokens(
    graphed, path, make_core, play, recorded
):
    params = [GREEDY, DRAWN, PENALISED] * 3
    expected = play(make_core(path), PROMPTS, params)
    core = make_core(path, recorded if graphed else None, overlap=True)
    fetch, calls = core.runner.transfers.fetch, []

    def fails_now_and_then(tensors):
        calls.append(len(tensors))
        if len(calls) in (3, 6, 7):  # the last two: a step that fails again when it is tried again
            raise torch.OutOfMemoryError("injected")
        return fetch(tensors)

    core.runner.transfers.fetch = fails_now_and_then
    assert play(core, PROMPTS, params) == expected
    assert len(calls) > 8
    assert core.stats.oom_retries_total == 3


def test_a_poisoned_row_of_a_replayed_step_ends_its_job_alone(path, make_core, play, recorded):
    expected = play(make_core(path), PROMPTS[:3], [GREEDY] * 3)
    core = make_core(path, recorded)

    def poison(point, work, hidden):
        if point == "hidden":
            for row, chunk in enumerate(work):
                if chunk.sequence.request_id == "1" and chunk.sequence.num_output == 3:
                    hidden[row] = torch.nan

    core.runner.fault_hook = poison
    found = play(core, PROMPTS[:3], [GREEDY] * 3)
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    tokens, reason, error = found[1]
    assert (tokens, reason) == (expected[1][0][:3], "error")
    assert "NaN" in error


def test_the_largest_batch_is_always_a_bucket_and_a_step_takes_the_smallest_that_fits():
    for most in (1, 2, 3, 7, 8, 9, 64, 100, 256, 300):
        sizes = [bucket.sequences for bucket in decode_buckets(most)]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(b - a <= 16 and b <= 2 * a + 8 for a, b in pairwise(sizes))
    assert [bucket.tokens for bucket in mixed_buckets(512, 64)] == [32, 64, 128, 256, 512]
    assert [bucket.tokens for bucket in mixed_buckets(7, 3)] == [7]
    assert [bucket.tokens for bucket in mixed_buckets(8192, 64)][-1] == 1024


def test_captured_work_that_reads_a_value_on_the_host_is_refused():
    values = torch.arange(4)
    out = torch.zeros(4)
    for read in (
        lambda: out.add_(values.sum().item()),
        lambda: out.add_(float(values[0])),
        lambda: out[values > 1].sum(),
        lambda: values.nonzero(),
        lambda: out.index_put_((values > 1,), torch.ones(2)),
    ):
        with pytest.raises(HostRead):
            RecordedCapture()(read)


def test_a_replay_does_the_same_operations_on_what_the_tensors_hold_by_then():
    given, out = torch.tensor([1.0, -2.0]), torch.zeros(2)

    def work():
        doubled = given * 2
        doubled[0] += 1
        out.copy_(doubled.view(2).abs())

    replay = RecordedCapture()(work)
    assert out.tolist() == [3.0, 4.0]
    given.copy_(torch.tensor([5.0, 6.0]))
    replay()
    assert out.tolist() == [11.0, 12.0]


def test_enforce_eager_captures_nothing():
    from tokenfleet.engine.execution.placement import pick_capture

    assert pick_capture(EngineConfig(".", enforce_eager=True), torch.device("cuda")) is None
    assert pick_capture(EngineConfig("."), torch.device("cpu")) is None
