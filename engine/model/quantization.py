"""What a config.json's `quantization_config` says about the weights: which of them are in FP8, and
how their scales are kept.

Every field is understood or refused by name: a scale that is read in another sense than it was
written in gives a model that talks nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenfleet.engine.errors import UnsupportedModel
from tokenfleet.engine.model.spec import Fp8Activations, Fp8Spec

_FP8_FIELDS = {
    "quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert",
    "ignored_layers", "fmt", "scale_fmt", "dequantize", "is_checkpoint_fp8_serialized",
    "kv_cache_scheme", "modules_to_convert", "expert_dtype",
}  # fmt: skip
_COMPRESSED_FIELDS = {
    "quant_method", "format", "quantization_status", "config_groups", "ignore", "kv_cache_scheme",
    "sparsity_config", "global_compression_ratio", "version",
}  # fmt: skip
_GROUP_FIELDS = {"targets", "weights", "input_activations", "output_activations", "format"}
_ARGS_NEUTRAL = {"observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"}


def read_quantization(raw: Mapping[str, Any]) -> Fp8Spec | None:
    """The FP8 form of a checkpoint's projections; None when config.json has none.

    Raises UnsupportedModel, naming the field, for any other kind of quantisation.
    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise UnsupportedModel(f"quantization_config must be an object, got {config!r:.100}")
    method = str(config.get("quant_method"))
    readers = {"fp8": _fp8, "compressed-tensors": _compressed_tensors}
    if method not in readers:
        raise UnsupportedModel(
            f"quantization_config: checkpoints quantised by {method!r} are not supported; use"
            f" the checkpoint in bfloat16, float16, float32 or quantised by {' or '.join(readers)}"
        )
    try:
        return readers[method](config)
    except (TypeError, ValueError, AttributeError) as error:  # a part of it is of no known kind
        raise UnsupportedModel(
            f"quantization_config: {dict(config)!r:.300} is not understood: {error}"
        ) from error


def is_ignored(module: str, patterns: Sequence[str]) -> bool:
    """Whether a list of modules that are not converted names `module`.

    A pattern is a run of whole components of the name, or a regular expression (`re:` before it or
    not) that matches the name from its start to the end of a component.
    """
    for pattern in patterns:
        plain = pattern.removeprefix("re:")
        if f".{plain}." in f".{module}.":
            return True
        try:
            if re.match(rf"(?:{plain})(?=\.|$)", module):
                return True
        except re.error as error:
            raise UnsupportedModel(
                f"quantization_config: {pattern!r} is neither a module nor a pattern: {error}"
            ) from error
    return False


def _fp8(config: Mapping[str, Any]) -> Fp8Spec:
    """`quant_method: fp8`, of transformers, vLLM and the DeepSeek and Qwen checkpoints."""
    _refuse_others(config, _FP8_FIELDS, "quantization_config")
    _only(config, "fmt", "e4m3")
    _only(config, "scale_fmt", "float")
    _only(config, "expert_dtype", "fp8")
    _only(config, "modules_to_convert", None)
    _only(config, "is_checkpoint_fp8_serialized", True)
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise UnsupportedModel(
            f"quantization_config: activation_scheme must be dynamic or static, got {scheme!r}"
        )
    block = _block(config.get("weight_block_size"), "weight_block_size")
    dynamic: Fp8Activations = "token" if block is None else "group"
    return Fp8Spec(
        block=block,
        activations="static" if scheme == "static" else dynamic,
        ignored=tuple(config.get("modules_to_not_convert") or config.get("ignored_layers") or ()),
    )


def _compressed_tensors(config: Mapping[str, Any]) -> Fp8Spec:
    """compressed-tensors in the format float-quantized; one scheme for the whole model."""
    _refuse_others(config, _COMPRESSED_FIELDS, "quantization_config")
    if config.get("kv_cache_scheme"):
        _float8(config["kv_cache_scheme"], "kv_cache_scheme")
        _only(config["kv_cache_scheme"], "strategy", "tensor")
        _only(config["kv_cache_scheme"], "dynamic", False)
    _only(config, "format", "float-quantized", "naive-quantized")
    _only(config, "quantization_status", "compressed", "frozen")
    _only(config, "sparsity_config", {})
    groups = list((config.get("config_groups") or {}).values())
    if not groups or any(_scheme(group) != _scheme(groups[0]) for group in groups):
        raise UnsupportedModel(
            f"quantization_config: config_groups must hold one scheme, has {len(groups)}"
        )
    for group in groups:
        _refuse_others(group, _GROUP_FIELDS, "config_groups")
        _only(group, "output_activations", None)
    weights, inputs = _scheme(groups[0])
    block = _weights(weights)
    return Fp8Spec(
        block=block,
        activations=_activations(inputs, block),
        ignored=tuple(config.get("ignore") or ()),
    )


def _scheme(group: Mapping[str, Any]) -> tuple[Any, Any]:
    return group.get("weights") or {}, group.get("input_activations")


def _weights(args: Mapping[str, Any]) -> tuple[int, int] | None:
    _float8(args, "weights")
    _only(args, "dynamic", False)
    _only(args, "strategy", "tensor", "channel", "block")
    if args.get("strategy") != "block":
        return None
    return _block(args.get("block_structure"), "block_structure")


def _activations(args: Mapping[str, Any] | None, block: tuple[int, int] | None) -> Fp8Activations:
    if args is None:
        return "none"
    _float8(args, "input_activations")
    dynamic, strategy = args.get("dynamic"), args.get("strategy")
    if strategy == "tensor" and not dynamic:
        return "static"
    if strategy == "token" and dynamic:
        return "token"
    if strategy == "group" and dynamic and block and args.get("group_size") == block[1]:
        return "group"
    raise UnsupportedModel(
        f"quantization_config: input_activations with strategy {strategy!r}, dynamic {dynamic!r},"
        f" group_size {args.get('group_size')!r} are not supported"
    )


def _float8(args: Mapping[str, Any], where: str) -> None:
    kind = args.get("type"), args.get("num_bits"), args.get("symmetric", True)
    if kind != ("float", 8, True):
        raise UnsupportedModel(
            f"quantization_config: {where} must be symmetric 8 bit floats, got {dict(args)}"
        )
    known = {
        "type", "num_bits", "symmetric", "dynamic", "strategy", "group_size", "block_structure"
    }  # fmt: skip
    _refuse_others(args, known | _ARGS_NEUTRAL, where)


def _block(value: Any, name: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if list(value) != [128, 128]:
        raise UnsupportedModel(
            f"quantization_config: {name} = {value!r} is not supported, only [128, 128]"
        )
    return (128, 128)


def _only(config: Mapping[str, Any], name: str, *allowed: Any) -> None:
    value = config.get(name)
    if value is not None and value not in allowed:
        raise UnsupportedModel(
            f"quantization_config: {name} = {value!r} is not supported, only"
            f" {' or '.join(repr(a) for a in allowed)}"
        )


def _refuse_others(config: Mapping[str, Any], known: set[str], where: str) -> None:
    for name, value in config.items():
        if name not in known and value not in (None, False, [], {}):
            raise UnsupportedModel(f"{where}: {name} = {value!r} is not known")
