"""Weights from a checkpoint into a Decoder, layer by layer.

A parameter is built from named tensors whose shapes are checked against the spec, so it is written
in full and once; the checkpoint refuses what is left over. Beyond the model itself there is never
more in memory than one layer's projection, or, where layers are smoothed, one layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tokenfleet.engine.errors import CheckpointError, ConfigError
from tokenfleet.engine.heap import give_back
from tokenfleet.engine.model.checkpoint import Checkpoint
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.fp8_weights import STORED, is_in_fp8, take_fp8, take_kv_scales
from tokenfleet.engine.model.layer import Attention, Layer
from tokenfleet.engine.model.mlp import GATES, DenseMlp, GroupedMoeMlp, MoeMlp
from tokenfleet.engine.model.rope import cos_sin_table
from tokenfleet.engine.model.smoothing import Calibration, can_smooth, smooth
from tokenfleet.engine.model.spec import LayerSpec, ModelSpec, MoESpec
from tokenfleet.engine.model.tensor_source import TensorSource
from tokenfleet.kernels.backend import uses_triton
from tokenfleet.kernels.linear import PackedWeight, pack_fp8, pack_linear
from tokenfleet.kernels.moe import ExpertWeights, stack_experts

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_FLOAT16_MAX = 65504.0


def load_decoder(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    quantization: str | None = None,
    kv_dtype: torch.dtype | None = None,
    sample: Sequence[int] = (),
) -> Decoder:
    """The decoder of the checkpoint in directory `path`, its weights converted to `dtype`.

    quantization: of the layers' projections, as pack_linear takes it; embeddings,
    routers and norms stay in `dtype`, and the output head does unless its weights are rounded too
    (in int8). A checkpoint in FP8 keeps the form it has. kv_dtype: what
    keys and values are cached in, FP8 over the checkpoint's scales or 1; None = `dtype`.
    sample: tokens of a text, by which layers in int8 are smoothed (smoothing.py); none = they are
    not.

    Raises CheckpointError, naming file and tensor, and ConfigError for float16 where the model is
    known to leave its range, and for another quantization than the checkpoint's own.
    """
    if spec.fp8 is not None and quantization not in (None, "fp8"):
        raise ConfigError(
            f"quantization {quantization!r} cannot be applied to a checkpoint that is in FP8;"
            " leave it out"
        )
    if dtype == torch.float16 and not spec.float16_safe:
        raise ConfigError(
            f"dtype float16 is too narrow for the activations of {spec.model_type};"
            " use bfloat16 or float32"
        )
    with torch.no_grad(), Checkpoint(path) as checkpoint:
        return Loader(
            checkpoint, spec, dtype, torch.device(device), quantization, kv_dtype, sample=sample
        ).decoder()


@dataclass(frozen=True, slots=True)
class Loader:
    """Builds a decoder, or pieces of it, from named tensors.

    Each tensor is taken once, whatever is built; what is left over is the source's to refuse.
    """

    checkpoint: TensorSource
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    quantization: str | None
    kv_dtype: torch.dtype | None
    stacked: bool | None = None  # experts in one tensor; None: as the device computes them
    sample: Sequence[int] = ()  # what layers in int8 are smoothed by
    plain: bool = False  # projections stay as they are read, to be packed later

    def decoder(self) -> Decoder:
        """All of it: every layer between the embedding and the output head."""
        spec = self.spec
        tables = {
            index: cos_sin_table(
                spec.ropes[index] if index is not None else None, spec.max_model_len, self.device
            )
            for index in {layer.rope for layer in spec.layers}
        }
        embedding = self.embedding()
        return Decoder(
            spec,
            embedding=embedding,
            layers=list(self.layers(embedding, [tables[layer.rope] for layer in spec.layers])),
            final_norm=self.final_norm(),
            lm_head=self.head(embedding),
            kv_dtype=self.kv_dtype,
            sample=self.sample,
        )

    def layers(self, embedding: Tensor, cos_sin: Sequence[Tensor]) -> Iterator[Layer]:
        """All layers over their rotary tables, one after the other; in int8 smoothed by the sample,
        where there is one and the model allows it."""
        smoothed = self.sample and self.quantization == "int8" and can_smooth(self.spec)
        if not smoothed or self.device.type == "meta":
            yield from (self.layer(i, table) for i, table in enumerate(cos_sin))
            return
        calibration = Calibration(self.spec, embedding, self.sample)
        wide = replace(self, plain=True)
        for i, table in enumerate(cos_sin):
            layer = wide.layer(i, table)
            yield smooth(layer, calibration.factors(layer))
            give_back()  # else the peak is a third higher in some starts

    def embedding(self) -> Tensor:
        """[vocab_size, H]."""
        return self._tensor(_EMBEDDING, self.spec.vocab_size, self.spec.hidden_size)

    def final_norm(self) -> Tensor:
        """[H]."""
        return self._tensor("model.norm.weight", self.spec.hidden_size)

    def head(self, embedding: Tensor) -> PackedWeight:
        """Tied to the embedding, unless the checkpoint brings a head of its own that differs."""
        spec = self.spec
        # half the bytes for each decode step; its inputs stay wide, so it loses next to nothing
        quantization = "int8_weights" if self.quantization == "int8" else None
        if spec.tie_embeddings and _HEAD not in self.checkpoint:
            return pack_linear(embedding, quantization=quantization)
        if self.checkpoint.dtype_of(_HEAD) == STORED:
            return self._linear("", ["lm_head"], [spec.vocab_size], spec.hidden_size, bias=False)
        head = self._tensor(_HEAD, spec.vocab_size, spec.hidden_size)
        same = spec.tie_embeddings and not head.is_meta and torch.equal(head, embedding)
        return pack_linear(embedding if same else head, quantization=quantization)

    def layer(self, index: int, cos_sin: Tensor) -> Layer:
        """One layer, over the rotary table that it shares with others."""
        layer, names, prefix = self.spec.layers[index], self.spec.names, f"model.layers.{index}."
        return Layer(
            attention=self._attention(prefix, layer, cos_sin),
            mlp=self._moe(prefix, layer.moe)
            if layer.moe
            else self._mlp(
                prefix, names.gate_up, names.down, layer.intermediate_size, bias=self.spec.mlp_bias
            ),
            attn_in=self._norm(prefix, names.attn_in),
            attn_out=self._norm(prefix, names.attn_out),
            mlp_in=self._norm(prefix, names.mlp_in),
            mlp_out=self._norm(prefix, names.mlp_out),
        )

    def _attention(self, prefix: str, layer: LayerSpec, cos_sin: Tensor) -> Attention:
        spec, names = self.spec, self.spec.names
        q_rows, kv_rows = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        widths = {"none": None, "head": (spec.head_dim,) * 2, "projection": (q_rows, kv_rows)}
        norm = widths[spec.qk_norm]
        return Attention(
            qkv=self._linear(
                prefix, names.qkv, [q_rows, kv_rows, kv_rows], spec.hidden_size, bias=spec.qkv_bias
            ),
            o=self._linear(prefix, [names.o], [spec.hidden_size], q_rows, bias=spec.o_bias),
            q_norm=self._tensor(f"{prefix}{names.q_norm}.weight", norm[0]) if norm else None,
            k_norm=self._tensor(f"{prefix}{names.k_norm}.weight", norm[1]) if norm else None,
            cos_sin=cos_sin,
            window=layer.window,
            kv_scales=take_kv_scales(self.checkpoint, f"{prefix}self_attn"),
        )

    def _mlp(
        self, prefix: str, gate_up: Sequence[str], down: str, width: int, *, bias: bool
    ) -> DenseMlp:
        hidden = self.spec.hidden_size
        return DenseMlp(
            gate_up=self._linear(prefix, gate_up, [width, width], hidden, bias=bias),
            down=self._linear(prefix, [down], [hidden], width, bias=bias),
            gate=GATES[self.spec.activation],
        )

    def _moe(self, prefix: str, moe: MoESpec) -> MoeMlp | GroupedMoeMlp:
        names, hidden = self.spec.names, self.spec.hidden_size
        router = self._tensor(f"{prefix}{names.router}.weight", moe.num_experts, hidden)
        if uses_triton(router) if self.stacked is None else self.stacked:
            width = moe.intermediate_size
            return GroupedMoeMlp(
                pack_linear(router),
                self._stacked(moe, prefix, names.expert_gate_up, [width, width], hidden),
                self._stacked(moe, prefix, [names.expert_down], [hidden], width),
                GATES[self.spec.activation],
                moe.top_k,
                moe.renormalize,
            )
        experts = tuple(
            self._mlp(
                prefix,
                [name.format(e) for name in names.expert_gate_up],
                names.expert_down.format(e),
                moe.intermediate_size,
                bias=False,
            )
            for e in range(moe.num_experts)
        )
        return MoeMlp(pack_linear(router), experts, moe.top_k, moe.renormalize)

    def _stacked(
        self, moe: MoESpec, prefix: str, parts: Sequence[str], rows: Sequence[int], columns: int
    ) -> ExpertWeights:
        """One projection of all experts; an expert at a time is held twice."""
        one_by_one = (
            self._linear(prefix, [part.format(e) for part in parts], rows, columns, bias=False)
            for e in range(moe.num_experts)
        )
        return stack_experts(one_by_one, moe.num_experts)

    def _norm(self, prefix: str, name: str | None) -> Tensor | None:
        return self._tensor(f"{prefix}{name}.weight", self.spec.hidden_size) if name else None

    def _linear(
        self, prefix: str, parts: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool
    ) -> PackedWeight:
        """One projection from its parts, top to bottom; a single part holds all rows already."""
        if len(parts) == 1:
            rows = [sum(rows)]
        modules, fp8 = [f"{prefix}{part}" for part in parts], self.spec.fp8
        biases = [self._view(f"{m}.bias", n) for m, n in zip(modules, rows) if bias]
        bias_column = self._stack(biases) if biases else None
        if is_in_fp8(self.checkpoint, fp8, modules) and fp8 is not None:
            codes, scales = take_fp8(self.checkpoint, fp8, modules, rows, columns, self.device)
            return pack_fp8(codes, scales, bias_column, dtype=self.dtype)
        weights = [self._view(f"{m}.weight", n, columns) for m, n in zip(modules, rows)]
        quantization = self.quantization if fp8 is None else None  # what FP8 left out stays wide
        whole = self._stack(weights)
        if self.plain:
            return PackedWeight(len(whole), columns, self.dtype, "plain", whole, bias_column)
        return pack_linear(whole, bias_column, quantization=quantization)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._stack([self._view(name, *shape)])

    def _stack(self, views: Sequence[Tensor]) -> Tensor:
        """Views of the files, one below the other, as one tensor of our own in dtype on device."""
        rows = sum(len(view) for view in views)
        whole = torch.empty((rows, *views[0].shape[1:]), dtype=self.dtype, device=self.device)
        start = 0
        for view in views:
            whole[start : start + len(view)].copy_(view)
            start += len(view)
        return whole

    def _view(self, name: str, *shape: int) -> Tensor:
        """A tensor of the checkpoint, which `dtype` can hold."""
        view = self.checkpoint.take(name, shape)
        if self.dtype == torch.float16 and view.dtype != torch.float16:
            largest = view.abs().max().item() if view.numel() else 0.0
            if not largest <= _FLOAT16_MAX:
                raise CheckpointError(
                    f"{self.checkpoint.file_of(name)}: tensor {name} reaches {largest:.6g}, beyond"
                    f" float16's {_FLOAT16_MAX:g}; use bfloat16 or float32"
                )
        return view
