"""Makes what a layer's projections are given easier to round to int8, without changing the layer.

A token's activations share one scale in int8, so a few channels that are always large take the
digits of all others. What comes out of a norm, or of the up projection, is therefore divided by a
factor for each channel, and the weights that read the channel are multiplied by it: sqrt(usual
magnitude of the channel / largest weight that reads it), as in SmoothQuant (Xiao et al., 2022),
with the root mean square over a sample text as the usual magnitude. The quotients are what is
stored, rounded to the model's dtype; the factors follow from them, so the product of the two is
the old one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.layer import Layer
from tokenfleet.engine.model.mlp import DenseMlp
from tokenfleet.engine.model.spec import ModelSpec
from tokenfleet.kernels.linear import PackedWeight, pack_linear
from tokenfleet.kernels.paged_attention import AttentionBatch

SAMPLE = """The harbour was quiet at six in the morning. Two boats had come in during the night,
and their crews sat on crates, drinking coffee and arguing about the price of fish: 4.20 a kilo, or
3.95 if one took all 300 of them. "You always say that," Maria laughed, "and then it rains."

def average(values: list[float]) -> float:
    if not values:
        raise ValueError("nothing to average")
    return sum(values) / len(values)

In 1869 the chemist arranged 63 elements by weight and left gaps where none was known; three were
found within 17 years. How does one explain this? First, the table was no list but a law. Second, a
law can be wrong, and this one could be tested. See https://example.org/table?id=7 for more."""
"""Prose, speech, code and figures; any text would do."""
TOKENS = 128
"""Of the sample, at most."""

_LEAST = 0.01
"""Share of the median below which a magnitude counts as this."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What a layer's weights are multiplied by, for each channel that they read; fp32."""

    attention: Tensor  # [H], of what QKV is given
    mlp: Tensor  # [H], of what gate-up is given
    down: Tensor  # [I], of what down is given


def can_smooth(spec: ModelSpec) -> bool:
    """Whether a norm without offset, or a gated product, gives each projection its inputs alone."""
    return (
        spec.fp8 is None
        and spec.norm_offset == 0.0
        and spec.names.attn_in is not None
        and spec.names.mlp_in is not None
        and not spec.mlp_bias
        and all(layer.moe is None for layer in spec.layers)
    )


class Calibration:
    """Runs a sample through the layers, one after the other, as they are loaded.

    Args:
        embedding: the model's, [vocab_size, H].
        sample: token ids, at least one; as many are used as the model has positions, up to TOKENS.
    """

    def __init__(self, spec: ModelSpec, embedding: Tensor, sample: Sequence[int]) -> None:
        sizes = spec.vocab_size, spec.hidden_size
        head = PackedWeight(*sizes, embedding.dtype, "plain", embedding, None)
        # its layers come one by one, and logits are not asked for
        self._decoder = Decoder(
            spec, embedding=embedding, layers=(), final_norm=embedding[0], lm_head=head
        )
        ids = torch.tensor(sample[: min(TOKENS, spec.max_model_len)])
        self._added: Tensor | None = None
        self._residual = self._decoder.embed(ids)
        self._batch = _one_prompt(len(ids))

    def factors(self, layer: Layer) -> Factors:
        """Of the next layer, in plain weights."""
        (pool,) = self._decoder.make_pools_for([layer], 2, self._batch.max_kv_len)
        given, self._added, self._residual = self._decoder.watch(
            layer, self._added, self._residual, self._batch, pool
        )
        assert isinstance(layer.mlp, DenseMlp)
        readers = layer.attention.qkv, layer.mlp.gate_up, layer.mlp.down
        return Factors(*(_factor(x, reader.data) for x, reader in zip(given, readers, strict=True)))


def smooth(layer: Layer, factors: Factors) -> Layer:
    """The layer, of plain weights, with its projections in int8."""
    assert isinstance(layer.mlp, DenseMlp)
    assert layer.attn_in is not None
    assert layer.mlp_in is not None
    attention, mlp = layer.attention, layer.mlp
    attn_in, into_qkv = _divided(layer.attn_in, factors.attention)
    mlp_in, into_mlp = _divided(layer.mlp_in, factors.mlp)
    up = torch.cat([torch.ones_like(factors.down), factors.down])  # the gate's outputs stay
    return replace(
        layer,
        attention=replace(
            attention, qkv=_in_int8(attention.qkv, columns=into_qkv), o=_in_int8(attention.o)
        ),
        mlp=replace(
            mlp,
            gate_up=_in_int8(mlp.gate_up, columns=into_mlp, rows=1.0 / up),
            down=_in_int8(mlp.down, columns=factors.down),
        ),
        attn_in=attn_in,
        mlp_in=mlp_in,
    )


def _factor(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, C] read by weight [N, C] -> [C], their geometric mean 1."""
    usual = _bounded(x.float().square().mean(0).sqrt())
    highest = _bounded(weight.abs().amax(0).float())
    logs = (usual.log() - highest.log()) / 2
    return (logs - logs.mean()).exp()


def _bounded(magnitudes: Tensor) -> Tensor:
    """Of channels: none is much smaller than most are; 1 where there is nothing to go by."""
    middle = magnitudes.median()
    if not (middle > 0 and magnitudes.isfinite().all()):
        return torch.ones_like(magnitudes)
    return magnitudes.clamp_min(_LEAST * middle)


def _divided(norm: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The norm's weights / factor in their own dtype; what gives them back from the quotients."""
    quotient = (norm.float() / factor).to(norm.dtype)
    exact = norm.float() / quotient.float()
    return quotient, torch.where(exact.isfinite(), exact, factor)


def _in_int8(
    plain: PackedWeight, *, columns: Tensor | None = None, rows: Tensor | None = None
) -> PackedWeight:
    weight = plain.data
    if columns is not None:
        weight = weight.float() * columns
    if rows is not None:
        weight = weight * rows[:, None]
    return pack_linear(weight, plain.bias, quantization="int8", dtype=plain.dtype)


def _one_prompt(length: int) -> AttentionBatch:
    """One sequence of `length` tokens, which fill block 1."""
    return AttentionBatch(
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        kv_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slots=torch.arange(length, 2 * length),
        positions=torch.arange(length),
        num_decodes=int(length == 1),
        max_query_len=length,
        max_kv_len=length,
    )
