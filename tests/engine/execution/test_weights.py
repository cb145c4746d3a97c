"""An update of the weights is whole or nothing, and no KV of the old ones is used after it."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenfleet.engine import (
    CheckpointError,
    Engine,
    EngineConfig,
    SamplingParams,
    WrongState,
)

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[5] * 20, [5] * 20 + [6], [9, 8, 7]]


@pytest.fixture(scope="module")
def old(tiny_random):
    return tiny_random("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def new(old, tmp_path_factory):
    """The same model with other weights."""
    path = tmp_path_factory.mktemp("new") / "model"
    shutil.copytree(old, path)
    weights = load_file(path / "model.safetensors")
    random = torch.Generator().manual_seed(9)
    for name, tensor in weights.items():
        if "norm" not in name:
            weights[name] = tensor + torch.randn(tensor.shape, generator=random) * tensor.std()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def engine(path, **changes):
    settings = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 80, "max_num_batched_tokens": 32}
    return Engine(EngineConfig(path, dtype="float32", device="cpu", **{**settings, **changes}))


def tokens(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("given", ["directory", "tensors"])
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_updated_weights_give_what_an_engine_started_with_them_gives(given, quantization, old, new):
    running = engine(old, quantization=quantization)
    before = tokens(running.generate(PROMPTS, GREEDY))
    weights = new if given == "directory" else load_file(new / "model.safetensors").items()
    assert running.update_weights(weights) == 1
    outputs = running.generate(PROMPTS, GREEDY)
    fresh = engine(new, quantization=quantization)
    assert tokens(outputs) == tokens(fresh.generate(PROMPTS, GREEDY))
    assert tokens(outputs) != before
    assert [output.weights_versions for output in outputs] == [[1]] * 3
    assert running.update_weights(old) == 2
    assert tokens(running.generate(PROMPTS, GREEDY)) == before


def test_no_old_prefix_is_hit_after_an_update(old, new):
    running = engine(old)
    running.generate(PROMPTS, GREEDY)
    hits = running.stats.cache_hits_total
    running.update_weights(new)
    running.audit()
    running.generate(PROMPTS[:1], GREEDY)
    assert running.stats.cache_hits_total == hits
    running.generate(PROMPTS[:1], GREEDY)
    assert running.stats.cache_hits_total > hits


@pytest.mark.parametrize("overlap", [False, True])
def test_a_running_output_goes_on_with_the_new_weights_and_names_both_versions(overlap, old, new):
    running = engine(old, overlap=overlap)
    expected = running.generate([PROMPTS[0]], GREEDY)[0].token_ids
    running.add("a", PROMPTS[0], GREEDY)
    running.add("waits", PROMPTS[2], GREEDY)
    events = [event for _ in range(4) for event in running.step()]
    running.update_weights(new)
    running.audit()
    while running.has_work:
        events += running.step()
        running.audit()
    mine = [event for event in events if event.id == "a"]
    said = [t for event in mine if event.weights_version == 0 for t in event.token_ids]
    then = [t for event in mine if event.weights_version == 1 for t in event.token_ids]
    assert said == expected[: len(said)]
    assert 0 < len(said) < 8
    fresh = engine(new)
    fresh.add("a", PROMPTS[0], GREEDY, resume=(tuple(said),))
    assert then == [t for event in iter_events(fresh) for t in event.token_ids]


def iter_events(running):
    while running.has_work:
        yield from running.step()


def damaged(new, change):
    weights = load_file(new / "model.safetensors")
    change(weights)
    return weights.items()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update(extra=torch.ones(2)), "no part of the model takes the tensor extra"),
        (lambda w: w.update({"lm_head.weight": torch.ones(3, 3)}), "lm_head.weight has shape"),
        (lambda w: w.update({"model.norm.weight": w["model.norm.weight"].long()}), "dtype"),
    ],
)
def test_weights_that_are_not_all_there_change_nothing(change, named, old, new):
    running = engine(old)
    before = tokens(running.generate(PROMPTS, GREEDY))
    with pytest.raises(CheckpointError, match=named):
        running.update_weights(damaged(new, change))
    assert tokens(running.generate(PROMPTS, GREEDY)) == before
    assert running.core.weights_version == 0
    twice = [*load_file(new / "model.safetensors").items()] * 2
    with pytest.raises(CheckpointError, match="given twice"):
        running.update_weights(twice)


@pytest.mark.parametrize(
    "given", [5, None, [1, 2], [("a", 1)], [("a", np.ones(2))], {"a": torch.ones(2)}, [(1, 2, 3)]]
)
def test_what_is_no_pair_of_name_and_tensor_is_refused(given, old):
    with pytest.raises(CheckpointError, match="pairs of name and tensor"):
        engine(old).update_weights(given)


def test_an_update_that_breaks_off_stops_the_engine_until_one_succeeds(old, new, tmp_path):
    running = engine(old)
    path = tmp_path / "shrinking"
    shutil.copytree(new, path)
    update = running.core.runner.prepare_weights(path)
    (path / "model.safetensors").unlink()
    running.core.runner.prepare_weights = lambda _weights: update
    with pytest.raises(CheckpointError):
        running.update_weights(path)
    running.add("a", PROMPTS[2], GREEDY)
    with pytest.raises(WrongState, match="broke off"):
        running.step()
    del running.core.runner.prepare_weights
    assert running.update_weights(new) == 1
    got = [t for event in iter_events(running) for t in event.token_ids]
    assert got == engine(new).generate([PROMPTS[2]], GREEDY)[0].token_ids


def test_a_checkpoint_of_another_model_is_refused(old, tiny_random):
    running = engine(old)
    with pytest.raises(CheckpointError):
        running.update_weights(tiny_random("llama", num_hidden_layers=3))
    with pytest.raises(CheckpointError):
        running.update_weights(tiny_random("llama", num_hidden_layers=2, intermediate_size=96))


def test_graphs_go_on_with_updated_weights(old, new, make_core, play, recorded):
    core = make_core(old, recorded)
    play(core, PROMPTS, [GREEDY] * 3)
    graphs = core.runner.model.graphs
    core.update_weights(new)
    assert play(core, PROMPTS, [GREEDY] * 3) == play(make_core(new), PROMPTS, [GREEDY] * 3)
    assert core.runner.model.graphs is graphs
