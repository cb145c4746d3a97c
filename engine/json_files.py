"""The JSON files of a checkpoint, as the model and its text both read them. No torch in here.

A file is an object or a CheckpointError that names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenfleet.engine.errors import CheckpointError, unreadable


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file that must be there.

    Raises:
        CheckpointError: it is not there, cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; `model` must be a directory with a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}; copy the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The object in a file that may be missing: nothing then. Else as read_json."""
    return read_json(path) if path.is_file() else {}


def eos_token_ids(path: Path, default: object = None) -> tuple[int, ...]:
    """Ids that end an output, as generation_config.json says, or else config.json, or `default`.

    path: the checkpoint's directory.

    Raises:
        CheckpointError: something else than ids.
    """
    for name in ("generation_config.json", "config.json"):
        ids = read_json_if_there(path / name).get("eos_token_id")
        if ids is not None:
            return _as_ids(path / name, ids)
    return _as_ids(path, default if default is not None else [])


def _as_ids(file: Path, ids: object) -> tuple[int, ...]:
    several = ids if isinstance(ids, list) else [ids]
    for one in several:
        if not isinstance(one, int) or isinstance(one, bool):
            raise CheckpointError(
                f"{file}: eos_token_id must be a token id or a list of them, got {ids!r:.100}"
            )
    return tuple(several)
