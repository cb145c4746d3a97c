"""The frames between the worker process and its engine process: msgpack arrays behind a length.

The first element of every frame is its kind. Nothing in a frame can name code: there is no pickle
and no ext type, so that a broken frame is an error and never a surprise.

    worker -> engine   init [config, options] | add [request] | abort [id, choice] | stop []
    engine -> worker   ready [info] | broken [error, message] | refused [id, code, message]
                       step [events, stats, free slots] | crashed [message]
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.stats import StepStats

INIT, ADD, ABORT, STOP = "init", "add", "abort", "stop"
READY, BROKEN, REFUSED, STEP, CRASHED = "ready", "broken", "refused", "step", "crashed"

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20

_DEFAULTS = SamplingParams()
_PARAM_DEFAULTS = {f.name: getattr(_DEFAULTS, f.name) for f in dataclasses.fields(_DEFAULTS)}
_STAT_NAMES = tuple(f.name for f in dataclasses.fields(StepStats))

Frame = list[Any]


def encode(kind: str, *fields: Any) -> bytes:
    """One frame, its length in front."""
    body: bytes = msgpack.packb([kind, *fields])
    return LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> Frame:
    """A frame's array, from its bytes without the length."""
    frame: Frame = msgpack.unpackb(body, strict_map_key=False)
    return frame


class FrameBuffer:
    """Cuts a byte stream into frames; what is incomplete stays until the rest has come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that is complete once `data` is appended."""
        self._bytes += data
        start = 0
        try:
            while len(self._bytes) - start >= LENGTH.size:
                (size,) = LENGTH.unpack_from(self._bytes, start)
                if size > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
                end = start + LENGTH.size + size
                if len(self._bytes) < end:
                    return
                body = bytes(self._bytes[start + LENGTH.size : end])
                start = end
                yield decode(body)
        finally:
            del self._bytes[:start]


def pack_request(request: EngineRequest) -> list[Any]:
    """An EngineRequest as plain values; parameters at their default are left out."""
    params = {
        name: _plain(value)
        for name, default in _PARAM_DEFAULTS.items()
        if (value := getattr(request.params, name)) != default
    }
    return [
        request.id,
        list(request.prompt_token_ids),
        params,
        [list(tokens) for tokens in request.resume],
        sorted(request.ended),
        request.priority,
        request.cache_salt,
    ]


def unpack_request(plain: list[Any]) -> EngineRequest:
    """The inverse of `pack_request`.

    Raises:
        InvalidRequest: a parameter is out of range.
    """
    id_, prompt, params, resume, ended, priority, salt = plain
    return EngineRequest(
        id=id_,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        resume=tuple(tuple(tokens) for tokens in resume),
        ended=frozenset(ended),
        priority=priority,
        cache_salt=salt,
    )


def pack_stats(stats: StepStats) -> list[Any]:
    """StepStats as a list, in the order of its fields."""
    return [getattr(stats, name) for name in _STAT_NAMES]


def unpack_stats(plain: list[Any]) -> StepStats:
    """The inverse of `pack_stats`."""
    return StepStats(*plain)


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "items") else value
