"""Drives a Decoder by hand: block tables, slots and chunks, without the engine."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import load_decoder
from tokenfleet.kernels.paged_attention import AttentionBatch


@dataclass
class Driver:
    """Runs sequences of a decoder; blocks are handed out in an order that is not sorted."""

    decoder: Decoder
    block_size: int = 4
    num_blocks: int = 64
    computed: list[int] = field(default_factory=list)  # tokens in the cache, a sequence
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pools = self.decoder.make_pools(self.num_blocks, self.block_size)
        for pool in self.pools:  # a result that reads what was never written shows itself
            scaled = pool.k_scales is not None and pool.v_scales is not None
            for held in (pool.k_scales, pool.v_scales) if scaled else (pool.k, pool.v):
                held.fill_(torch.nan)
        self._free = [b * 7 % self.num_blocks or 7 for b in range(1, self.num_blocks)]
        self._free = list(dict.fromkeys(self._free))

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            self.computed.append(0)
            self.tables.append([])

    def step(self, chunks: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """One forward pass over `chunks` (sequence -> its next tokens): logits of all of them."""
        order = sorted(chunks, key=lambda s: (len(chunks[s]) != 1, s))
        batch = self._batch(order, [len(chunks[s]) for s in order])
        ids = torch.tensor([t for s in order for t in chunks[s]])
        with torch.inference_mode():
            logits = self.decoder.logits(self.decoder.forward(ids, batch, self.pools))
        parts = logits.split([len(chunks[s]) for s in order])
        return dict(zip(order, parts, strict=True))

    def prefill(self, tokens: Sequence[int], chunk: int) -> torch.Tensor:
        """A new sequence, `chunk` tokens a step: logits of every position."""
        self.add()
        s = len(self.tables) - 1
        steps = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return torch.cat([self.step({s: part})[s] for part in steps])

    def _batch(self, order: list[int], lengths: list[int]) -> AttentionBatch:
        positions, slots = [], []
        for s, n in zip(order, lengths, strict=True):
            for p in range(self.computed[s], self.computed[s] + n):
                if p // self.block_size == len(self.tables[s]):
                    self.tables[s].append(self._free.pop())
                positions.append(p)
                slots.append(
                    self.tables[s][p // self.block_size] * self.block_size + p % self.block_size
                )
            self.computed[s] += n
        kv_lens = [self.computed[s] for s in order]
        width = max(len(self.tables[s]) for s in order)
        tables = [self.tables[s] + [0] * (width - len(self.tables[s])) for s in order]
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        return AttentionBatch(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slots=torch.tensor(slots),
            positions=torch.tensor(positions),
            num_decodes=sum(n == 1 for n in lengths),
            max_query_len=max(lengths),
            max_kv_len=max(kv_lens),
        )


@pytest.fixture
def driver() -> Callable[..., Driver]:
    """driver(path, max_model_len=None, dtype=torch.float32, ...) -> Driver of a fresh decoder."""

    def make(
        path: Path,
        *,
        max_model_len: int | None = None,
        dtype=torch.float32,
        num_blocks: int = 64,
        **options,
    ) -> Driver:
        spec = read_spec(path, max_model_len=max_model_len)
        decoder = load_decoder(path, spec, dtype=dtype, device="cpu", **options)
        return Driver(decoder, num_blocks=num_blocks)

    return make


@pytest.fixture
def edited(tmp_path) -> Callable[..., Path]:
    """edited(path, config=None, index=None) -> a copy whose JSON files went through the functions.

    Weights are links to the original's: replace them, do not write into them.
    """

    def make(path: Path, *, config=None, index=None) -> Path:
        copy = tmp_path / "edited"
        copy.mkdir()
        for file in path.iterdir():
            if file.suffix == ".safetensors":
                (copy / file.name).symlink_to(file)
            else:
                shutil.copy(file, copy)
        for name, edit in (("config.json", config), ("model.safetensors.index.json", index)):
            if edit is not None:
                content = json.loads((copy / name).read_text())
                edit(content)
                (copy / name).write_text(json.dumps(content))
        return copy

    return make


@pytest.fixture
def make_fp8(tmp_path) -> Callable[..., tuple[Path, Path]]:
    """make_fp8(path, form, config, kept=(), static=None, inverse=False) -> (FP8, dequantised).

    Two checkpoints with equal weights, the second in fp32. form: "tensor", "channel" or "block".
    kept: parts of module names that stay wide. static: a module's name -> its input scale.
    inverse: scales are called weight_scale_inv.
    """

    def make(path: Path, form: str, config: dict, *, kept=(), static=None, inverse=False):
        tensors, narrow, wide = load_file(path / "model.safetensors"), {}, {}
        for name, tensor in tensors.items():
            if tensor.dim() != 2 or any(part in name for part in ("embed", "lm_head", *kept)):
                narrow[name] = wide[name] = tensor
                continue
            module = name.removesuffix(".weight")
            scale = SCALES[form](tensor)
            spread = _spread(scale, tensor.shape)
            narrow[name] = (tensor / spread).to(torch.float8_e4m3fn)
            narrow[f"{module}.weight_scale{'_inv' if inverse else ''}"] = scale
            wide[name] = narrow[name].float() * spread
            if static is not None:
                narrow[f"{module}.input_scale"] = torch.tensor([static(module)])
        made = tmp_path / "fp8", tmp_path / "dequantised"
        for copy, content in zip(made, (narrow, wide), strict=True):
            shutil.copytree(path, copy)
            save_file(content, copy / "model.safetensors", metadata={"format": "pt"})
        fields = json.loads((made[0] / "config.json").read_text())
        (made[0] / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
        return made

    return make


def _blocks_of(weight):
    tall, wide = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    scale = torch.empty(tall, wide)
    for i in range(tall):
        for j in range(wide):
            scale[i, j] = weight[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].abs().max()
    return scale / 448 * 1.25


SCALES = {
    "tensor": lambda w: w.abs().max() / 448 * 1.25,
    "channel": lambda w: w.abs().amax(1, keepdim=True) / 448 * 1.25,
    "block": _blocks_of,
}


def _spread(scale, shape):
    if scale.dim() != 2 or (scale.shape[1] == 1 and scale.shape[0] == shape[0]):
        return scale
    rows = scale.repeat_interleave(128, 0)[: shape[0]]
    return rows.repeat_interleave(128, 1)[:, : shape[1]]
