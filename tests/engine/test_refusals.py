"""What the engine takes from a program, and how it refuses the rest: by its own errors alone."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from tokenfleet.engine import (
    CheckpointError,
    ConfigError,
    EngineConfig,
    EngineError,
    InvalidRequest,
    SamplingParams,
    UnsupportedModel,
    WrongState,
)

ODD: list[Any] = [
    *(None, "", b"x", "\ud800", 0, -1, 1.5, True, 10**400, math.nan, math.inf, object()),
    *([], {}, {1, 2}, ["a"], [b"a"], {"json": 1}, {5: math.nan}, {(1, 2): 3}, [2**40], range(3)),
    *(np.int64(3), np.float32(0.5), np.array([1, 2]), [np.int64(1)]),
]


def refusals(kind: Any, field: str, **others: Any) -> set[type[Exception] | None]:
    found: set[type[Exception] | None] = set()
    for value in ODD:
        try:
            kind(**others, **{field: value})
        except EngineError as error:
            assert field in str(error) or field == "max_tokens", error  # noqa: PT017 # of many
            found.add(type(error))
        else:
            found.add(None)
    return found


@pytest.mark.parametrize("field", list(EngineConfig.__dataclass_fields__))
def test_a_setting_is_taken_or_refused_by_its_name(field: str) -> None:
    others = {} if field == "model" else {"model": "/nowhere"}
    found = refusals(EngineConfig, field, **others)
    assert ConfigError in found
    assert found <= {None, ConfigError}


@pytest.mark.parametrize("field", list(SamplingParams.__dataclass_fields__))
def test_a_sampling_parameter_is_taken_or_refused_by_its_name(field: str) -> None:
    found = refusals(SamplingParams, field)
    assert InvalidRequest in found
    assert found <= {None, InvalidRequest}


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a"),
        CheckpointError("b"),
        UnsupportedModel("c"),
        WrongState("d"),
        InvalidRequest("bad_prompt", "e"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_gets_whole_to_another_process(error: EngineError) -> None:
    found = pickle.loads(pickle.dumps(error))  # noqa: S301 # our own
    assert (type(found), str(found), found.__dict__) == (type(error), str(error), error.__dict__)
