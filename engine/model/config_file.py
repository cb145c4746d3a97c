"""A checkpoint's JSON files: read, and refused with the file's name when they are not usable."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenfleet.engine.errors import CheckpointError, ConfigError, UnsupportedModel
from tokenfleet.engine.model.rope import longest_context


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; `model` must be a directory with a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def transformers_config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # its checks raise what they like
        raise UnsupportedModel(
            f"{path / 'config.json'} is refused by transformers: {error}"
        ) from error


def model_length(config: Any, wanted: int | None) -> int:
    limit = int(config.max_position_embeddings)
    if wanted is None:
        return limit
    parameters = config.rope_parameters or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    longest = max(longest_context(p, limit) for p in nested or [parameters])
    if not 1 <= wanted <= longest:
        raise ConfigError(
            f"max_model_len must be between 1 and {longest} for this model, got {wanted}"
        )
    return wanted


def end_tokens(path: Path, config: Any) -> tuple[int, ...]:
    """generation_config.json's eos_token_id, one or several; config.json's when it has none."""
    file = path / "generation_config.json"
    ids = read_json(file).get("eos_token_id") if file.exists() else None
    if ids is None:
        ids = config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def dtype_name(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(f"dtype {name!r} is not supported; use float32, float16 or bfloat16")
    return name
