"""A paged-KV continuous-batching engine: tokens in, tokens out.

Public names are loaded when first touched, so that a process which only needs the text side or
the parameter types never pays for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenfleet.engine.config import EngineConfig as EngineConfig
    from tokenfleet.engine.core import CoreEvent as CoreEvent
    from tokenfleet.engine.core import EngineCore as EngineCore
    from tokenfleet.engine.engine import Engine as Engine
    from tokenfleet.engine.errors import CheckpointError as CheckpointError
    from tokenfleet.engine.errors import ConfigError as ConfigError
    from tokenfleet.engine.errors import EngineError as EngineError
    from tokenfleet.engine.errors import InvalidRequest as InvalidRequest
    from tokenfleet.engine.errors import InvariantBroken as InvariantBroken
    from tokenfleet.engine.errors import UnsupportedModel as UnsupportedModel
    from tokenfleet.engine.errors import WrongState as WrongState
    from tokenfleet.engine.outputs import Choice as Choice
    from tokenfleet.engine.outputs import Output as Output
    from tokenfleet.engine.outputs import OutputEvent as OutputEvent
    from tokenfleet.engine.request import EngineRequest as EngineRequest
    from tokenfleet.engine.sampling_params import SamplingParams as SamplingParams
    from tokenfleet.engine.stats import StepStats as StepStats

_ROOMS = {
    "config": ("EngineConfig",),
    "core": ("CoreEvent", "EngineCore"),
    "request": ("EngineRequest",),
    "engine": ("Engine",),
    "outputs": ("Output", "Choice", "OutputEvent"),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "EngineError",
        "InvalidRequest",
        "InvariantBroken",
        "UnsupportedModel",
        "WrongState",
    ),
    "sampling_params": ("SamplingParams",),
    "stats": ("StepStats",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
