"""Settings: where they come from, and what a wrong one says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tokenfleet.engine.config import EngineConfig
from tokenfleet.worker.settings import (
    SettingsError,
    WorkerSettings,
    engine_config,
    load_settings,
    unknown_variables,
)

PUBLIC = {
    "redis_url", "namespace", "model", "model_name", "max_num_seqs", "max_num_batched_tokens",
    "max_model_len", "block_size", "num_blocks", "prefix_cache", "gpu_memory_fraction",
    "enforce_eager", "dtype", "device", "quantization", "kv_cache_dtype", "lease_s", "grace_s",
    "flush_interval_ms", "prefetch", "max_failures", "result_ttl_s", "log_ttl_s", "health_host",
    "health_port", "otlp_endpoint", "otlp_protocol", "log_level",
}  # fmt: skip


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("TOKENFLEET_")]:
        monkeypatch.delenv(name)


def test_every_public_name_is_a_setting() -> None:
    assert WorkerSettings.model_fields.keys() >= PUBLIC


def test_flags_come_before_environment_before_file_before_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('model = "/m"\nlease_s = 1\ngrace_s = 1\nprefetch = 1\n')
    monkeypatch.setenv("TOKENFLEET_CONFIG", str(file))
    monkeypatch.setenv("TOKENFLEET_GRACE_S", "2")
    monkeypatch.setenv("TOKENFLEET_PREFETCH", "3")
    settings = load_settings(prefetch=4, model_name=None)
    assert (settings.lease_s, settings.grace_s, settings.prefetch) == (1.0, 2.0, 4)
    assert settings.max_failures == 3
    assert settings.served_name == "m"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_s", "0"),
        ("lease_s", "0.0001"),
        ("lease_s", "1e16"),
        ("result_ttl_s", "1e-9"),
        ("log_ttl_s", "1e16"),
        ("grace_s", "-1"),
        ("flush_interval_ms", "soon"),
        ("max_num_seqs", "0"),
        ("block_size", "24"),
        ("gpu_memory_fraction", "1.5"),
        ("dtype", "int4"),
        ("device", "tpu"),
        ("quantization", "int3"),
        ("health_port", "70000"),
        ("redis_url", "http://localhost"),
        ("redis_url", "redis://localhost/0?decode_responses=true"),
        ("redis_url", "redis://localhost/0?max_connections=1"),
        ("namespace", "a b"),
        ("log_level", "loud"),
        ("prefetch", "-1"),
        ("otlp_protocol", "carrier-pigeon"),
    ],
)
def test_a_bad_value_stops_the_start_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TOKENFLEET_{name.upper()}", value)
    with pytest.raises(SettingsError, match=name):
        load_settings(model="/m")


def test_a_missing_model_says_both_ways_to_give_it() -> None:
    with pytest.raises(SettingsError, match=r"--model or TOKENFLEET_MODEL"):
        load_settings()


def test_an_unknown_name_in_the_file_is_refused_with_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('model = "/m"\nmax_num_seq = 4\n')
    monkeypatch.setenv("TOKENFLEET_CONFIG", str(file))
    with pytest.raises(SettingsError, match=r"max_num_seq is no .* mean max_num_seqs"):
        load_settings()


@pytest.mark.parametrize("content", [None, "not toml ["])
def test_a_file_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "worker.toml"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("TOKENFLEET_CONFIG", str(file))
    with pytest.raises(SettingsError, match=r"worker\.toml"):
        load_settings(model="/m")


def test_a_password_never_shows_in_an_error() -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(model="/m", redis_url="rediss//user:secret@host")
    assert "secret" not in str(error.value)


def test_variables_that_are_no_settings_are_found_and_not_refused() -> None:
    found = unknown_variables(
        {"TOKENFLEET_MAX_NUM_SEQ": "1", "TOKENFLEET_FOO": "1", "TOKENFLEET_LEASE_S": "1"}
        | dict.fromkeys(("TOKENFLEET_CONFIG", "TOKENFLEET_TENANT", "TOKENFLEET_KERNELS"), "x")
    )
    assert found == [
        "TOKENFLEET_FOO",
        "TOKENFLEET_MAX_NUM_SEQ (did you mean TOKENFLEET_MAX_NUM_SEQS?)",
    ]


def test_what_the_engine_shares_has_the_same_name_and_default() -> None:
    ours = {name: field.default for name, field in WorkerSettings.model_fields.items()}
    theirs = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    shared = ours.keys() & theirs.keys() - {"model"}
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    config = engine_config(load_settings(model="/m", max_num_seqs=3, quantization="int8"))
    assert (config.model, config.max_num_seqs, config.quantization) == (Path("/m"), 3, "int8")
