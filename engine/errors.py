"""What the engine refuses, as types.

    EngineError
    |- ConfigError        a setting of EngineConfig is out of range, or the device is not there
    |- UnsupportedModel   an architecture or a field that this engine does not implement
    |- CheckpointError    a file or tensor is missing, short, of the wrong shape, or left over
    |- InvalidRequest     one request cannot be run; `code` is stable, the message is for people
    |- WrongState         asked for at a wrong time: the engine sleeps, runs, or lacks weights
    `- InvariantBroken    audit() found the engine's own bookkeeping wrong: a bug, never a user's
    fault

Every message names the thing, the value and the way out.
"""

from __future__ import annotations

import os
from pathlib import Path


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """A setting is out of range or does not fit this machine."""


class UnsupportedModel(EngineError):
    """The checkpoint asks for arithmetic that this engine does not implement."""


class CheckpointError(EngineError):
    """A checkpoint's files and tensors are not what its config promises."""


def unreadable(path: Path, error: OSError | UnicodeDecodeError) -> CheckpointError:
    """What to raise for a file of a checkpoint that is there and cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return CheckpointError(f"{path}: a file of it is no UTF-8 ({error}); copy it again")
    file, reason = error.filename or path, error.strerror or error
    who = f"; this process is user {os.geteuid()}" if isinstance(error, PermissionError) else ""
    return CheckpointError(f"{file} cannot be read: {reason}{who}")


class InvalidRequest(EngineError):
    """One request is refused; the engine and all other requests go on.

    Args:
        code: stable word for programs: `empty_prompt`, `bad_prompt`, `prompt_too_long`,
            `token_out_of_range`, `invalid_parameter`, `never_fits`, `duplicate_id`, `unknown_id`,
            `unsupported`, `unsupported_grammar`, `no_chat_template`, `bad_messages`.
        message: sentence for people: the value, and the way out.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str]]:
        return type(self), (self.code, str(self))


class WrongState(EngineError):
    """The engine cannot do this now: it sleeps, has requests, or its weights are incomplete."""


class InvariantBroken(EngineError):
    """The engine's bookkeeping contradicts itself."""
