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
from tokenfleet.engine.core import EngineCore, EngineRequest


@pytest.fixture
def core(tiny_random: Any) -> EngineCore:
    return EngineCore(
        EngineConfig(tiny_random("llama"), dtype="float32", device="cpu", max_num_seqs=4,
                     num_blocks=32, max_num_batched_tokens=64)
    )  # fmt: skip


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
    "field", [f for f in EngineRequest.__dataclass_fields__ if f != "prompt_token_ids"]
)
def test_a_requests_field_is_taken_or_refused_and_harms_nobody(
    field: str, core: EngineCore
) -> None:
    """Each beside a request that is as it should be; all of them end."""
    refused = set()
    for value in [*ODD, np.array(3), ("x",), ((1,), (2,)), (None,)]:
        core.add(EngineRequest("good", [1], SamplingParams(max_tokens=1)))
        fields = {"id": "odd", "params": SamplingParams(max_tokens=1), field: value}
        try:
            core.add(EngineRequest(prompt_token_ids=[1], **fields))
        except InvalidRequest as error:
            refused.add(error.code)
            assert field in str(error)  # noqa: PT017 # of many
        while core.has_work:
            core.step()
        core.audit()
    assert refused <= {"invalid_parameter", "token_out_of_range"}
    assert "invalid_parameter" in refused


def test_a_prompt_is_taken_or_refused(core: EngineCore) -> None:
    for value in [*ODD, np.array(3), np.array([[1, 2]]), np.array([1.0])]:
        try:
            core.add(EngineRequest("x", value, SamplingParams(max_tokens=1)))
        except InvalidRequest as error:
            assert error.code in ("bad_prompt", "empty_prompt", "token_out_of_range")  # noqa: PT017
        while core.has_work:
            core.step()


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
