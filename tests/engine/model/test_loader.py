"""Weights get in whole, or the file and the tensor that are wrong are named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenfleet.engine.errors import CheckpointError
from tokenfleet.engine.model import loader
from tokenfleet.engine.model.checkpoint import INDEX, Checkpoint
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import load_decoder

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(path, dtype=torch.float32):
    return load_decoder(path, read_spec(path), dtype=dtype, device="cpu")


@pytest.fixture
def sharded(tiny_random, tmp_path):
    """A copy of a checkpoint in several shards, and the name of the one that holds Q_PROJ."""
    source = tiny_random("llama", max_shard_size=500_000)
    path = tmp_path / "sharded"
    shutil.copytree(source, path)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    return path, path / weight_map[Q_PROJ]


@pytest.fixture
def single(tiny_random, tmp_path):
    """A copy of a one-file checkpoint, and that file."""
    path = tmp_path / "single"
    shutil.copytree(tiny_random("llama"), path)
    return path, path / "model.safetensors"


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def packed(monkeypatch):
    """The tensors that are packed while the test loads, in order; how they are laid out after
    that is the kernels' own affair."""
    weights: list[torch.Tensor] = []
    pack = loader.pack_linear

    def record(weight, bias=None, **options):
        weights.append(weight)
        return pack(weight, bias, **options)

    monkeypatch.setattr(loader, "pack_linear", record)
    return weights


def test_shards_give_the_same_model_as_one_file(sharded, single, driver):
    whole, parts = driver(single[0]), driver(sharded[0])
    assert torch.equal(whole.prefill([1, 2, 3], 3), parts.prefill([1, 2, 3], 3))


def test_every_weight_is_in_memory_of_its_own(single, packed):
    path, file = single
    decoder = load(path)
    held = [*packed, decoder.embedding, decoder.final_norm, decoder.layers[2].mlp_in]
    before = [weight.clone() for weight in held]
    size = file.stat().st_size
    with file.open("r+b") as stream:  # a deployment that overwrites the file under a live engine
        stream.seek(size // 10)
        stream.write(b"\x77" * (size - size // 10))
    assert all(torch.equal(now, then) for now, then in zip(held, before, strict=True))


def test_a_tensor_is_taken_once(single):
    checkpoint = Checkpoint(single[0])
    checkpoint.take("model.norm.weight", [144])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is used twice"):
        checkpoint.take("model.norm.weight", [144])


def test_a_tied_head_is_packed_from_the_embedding_itself(single, packed):
    path, file = single
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    rewrite(file, lambda t: t.pop("lm_head.weight"))
    decoder = load(path)
    assert packed[-1] is decoder.embedding


def test_a_head_that_equals_the_tied_embedding_is_not_kept(single, packed):
    path, file = single
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    rewrite(file, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    decoder = load(path)
    assert packed[-1] is decoder.embedding


def test_a_head_that_differs_from_the_tied_embedding_is_used_as_transformers_does(
    single, reference, driver
):
    path, _ = single
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with torch.inference_mode():
        wanted = reference(path)(torch.tensor([[1, 2, 3]])).logits[0]
    torch.testing.assert_close(driver(path).prefill([1, 2, 3], 3), wanted, atol=1e-4, rtol=0)


def test_buffers_that_old_exports_saved_are_ignored(single):
    path, file = single
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(file, lambda t: t.update({name: torch.zeros(16)}))
    load(path)


def test_a_missing_shard_is_named(sharded):
    path, shard = sharded
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing; .* tensor model"):
        load(path)


@pytest.mark.parametrize("missing", ["one byte", "half", "all but 100 bytes", "all"])
def test_a_short_shard_is_named_with_a_tensor_that_it_cuts(sharded, missing):
    path, shard = sharded
    size = shard.stat().st_size
    left = {"one byte": size - 1, "half": size // 2, "all but 100 bytes": 100, "all": 0}[missing]
    with shard.open("r+b") as stream:
        stream.truncate(left)
    detail = "cut short inside its header" if left <= 100 else r"tensor model\.\S+ is cut short"
    with pytest.raises(CheckpointError, match=rf"{shard.name}.*{detail}"):
        load(path)


def test_bytes_behind_the_last_tensor_are_refused(single):
    path, file = single
    with file.open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has .* bytes behind its last"):
        load(path)


@pytest.mark.parametrize("header", [b"{}", b"[1]", b"not json", b'{"a": {"dtype": "F32"}}'])
def test_a_header_that_cannot_be_read_is_refused(single, header):
    path, file = single
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*header|embed_tokens.*missing"):
        load(path)


@pytest.mark.parametrize("stale", ["names a tensor", "forgets a tensor", "wrong shard"])
def test_a_stale_index_is_refused_naming_the_tensor(sharded, stale):
    path, shard = sharded
    index = json.loads((path / INDEX).read_text())
    weight_map = index["weight_map"]
    match stale:
        case "names a tensor":
            weight_map["model.layers.9.mlp.up_proj.weight"] = shard.name
        case "forgets a tensor":
            del weight_map[Q_PROJ]
        case "wrong shard":
            weight_map[Q_PROJ] = next(s for s in weight_map.values() if s != shard.name)
    (path / INDEX).write_text(json.dumps(index))
    name = "model.layers.9.mlp.up_proj.weight" if stale == "names a tensor" else Q_PROJ
    with pytest.raises(CheckpointError, match=rf"model-0.*{name}.*index is stale"):
        load(path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../x"}}',
    ],
)
def test_an_index_that_is_none_is_refused(sharded, content):
    path, _ = sharded
    (path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(path)


def test_a_directory_that_cannot_be_looked_into_is_named():
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        Checkpoint(Path("a" * 300))


def test_shards_without_their_index_are_refused(sharded):
    path, _ = sharded
    (path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"index\.json is missing"):
        load(path)


def test_a_directory_without_weights_is_refused(single):
    path, file = single
    file.rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors"):
        load(path)


def test_a_wrong_shape_is_refused(single):
    path, file = single
    rewrite(file, lambda t: t.update({Q_PROJ: t[Q_PROJ][:-1].clone()}))
    message = rf"model\.safetensors: tensor {Q_PROJ} has shape \[287, 144\].* \[288, 144\]"
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_a_wrong_dtype_is_refused(single, dtype):
    path, file = single
    rewrite(file, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {Q_PROJ} has dtype"):
        load(path)


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(single, name):
    path, file = single
    rewrite(file, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load(path)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "extra"]
)
def test_a_tensor_that_nobody_takes_is_named(single, name):
    path, file = single
    rewrite(file, lambda t: t.update({name: torch.zeros(288)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: no part .* {name}"):
        load(path)


def test_a_config_that_asks_for_fewer_layers_than_there_are_is_refused(tiny_random, edited):
    path = edited(tiny_random("llama"), config=lambda c: c.update(num_hidden_layers=2))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* and \d+ more"):
        load(path)


@pytest.mark.parametrize("value", [65505.0, 1e30, float("inf"), float("nan")])
def test_a_weight_beyond_float16_is_refused_and_not_clipped(single, value):
    path, file = single

    def spoil(tensors):
        tensors[Q_PROJ][3, 5] = value

    rewrite(file, spoil)
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} reaches .* float16's 65504"):
        load(path, dtype=torch.float16)


def test_an_activation_beyond_float16_ends_in_logits_that_are_not_finite(single, driver):
    path, file = single
    rewrite(file, lambda t: t["model.layers.0.mlp.up_proj.weight"].mul_(30_000))
    assert driver(path).prefill([1, 2, 3], 3).isfinite().all()
    assert not driver(path, dtype=torch.float16).prefill([1, 2, 3], 3).isfinite().any(dim=1).any()


def test_the_largest_float16_weight_is_kept(single, packed):
    path, file = single

    def stretch(tensors):
        tensors[Q_PROJ][0, 0] = 65504.0

    rewrite(file, stretch)
    load(path, dtype=torch.float16)
    assert max(weight.max().item() for weight in packed) == 65504.0


def test_weights_are_packed_one_projection_at_a_time_and_each_once(single, packed):
    path, file = single
    decoder = load(path)
    sizes = [weight.nbytes for weight in packed]
    norms = sum(n.nbytes for x in decoder.layers for n in (x.attn_in, x.mlp_in))
    others = decoder.embedding.nbytes + decoder.final_norm.nbytes + norms
    total = sum(t.nbytes for t in load_file(file).values())
    assert sum(sizes) + others == total
    assert max(sizes) < total / 4
