"""Settings and keys: where they come from, and what is wrong with them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.gateway.api_keys import CHECK_S, Caller, Keyring, new_key, read_keys
from tokenfleet.producer.gateway.settings import (
    GatewaySettings,
    SettingsError,
    load_settings,
    unknown_variables,
)
from tokenfleet.worker.settings import unknown_variables as unknown_to_workers


def test_flags_go_over_environment_over_file(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text('host = "localhost"\nport = 1\ngrace_s = 1\nmodels = ["a", "b"]\n')
    environ = {
        "TOKENFLEET_GATEWAY_CONFIG": str(config),
        "TOKENFLEET_GATEWAY_PORT": "2",
        "TOKENFLEET_GATEWAY_GRACE_S": "2",
        "TOKENFLEET_REDIS_URL": "redis://shared:6379/0",
        "TOKENFLEET_MODEL": "/a/worker's",
    }
    found = load_settings({"grace_s": "3", "port": None}, environ)
    assert (found.host, found.port, found.grace_s) == ("localhost", 2, 3.0)
    assert found.models == ("a", "b")
    assert found.redis_url == "redis://shared:6379/0"
    environ["TOKENFLEET_GATEWAY_REDIS_URL"] = "redis://own:6379/0"
    assert load_settings({}, environ).redis_url == "redis://own:6379/0"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"port": "70000"}, "port (TOKENFLEET_GATEWAY_PORT): "),
        ({"unknown_models": "guess"}, "'refuse' or 'queue'"),
        ({"namespace": "a b"}, "namespace (TOKENFLEET_GATEWAY_NAMESPACE): "),
        ({"host": "0.0.0.0"}, "--anonymous-tenant"),
        ({"host": "gateway.example"}, "--keys-file"),
        ({"anonymous_tenant": "../x"}, "anonymous_tenant"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, {})
    assert says in str(caught.value)


def test_a_name_that_is_none_is_met_with_the_nearest(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("prot = 3\n")
    with pytest.raises(SettingsError, match="prot is no setting; did you mean port"):
        load_settings({}, {}, config)
    assert unknown_variables({"TOKENFLEET_GATEWAY_PROT": "3", "TOKENFLEET_PROT": "3"}) == [
        "TOKENFLEET_GATEWAY_PROT (did you mean TOKENFLEET_GATEWAY_PORT?)"
    ]
    assert unknown_to_workers({"TOKENFLEET_GATEWAY_PORT": "3"}) == []


def test_a_password_in_the_address_is_not_shown() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"redis_url": ["redis://:secret@x"]}, {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_a_gateway_that_only_this_machine_reaches_asks_for_no_key(host: str) -> None:
    assert GatewaySettings(host=host).stranger == "default"
    assert GatewaySettings(host=host, keys_file=Path("x")).stranger is None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def key_file(tmp_path: Path) -> tuple[Path, str]:
    """A file with one key, and the key."""
    key, entry = new_key("alice", "laptop")
    path = tmp_path / "keys.toml"
    path.write_text(entry + 'priority = "batch"\nstatus = true\n')
    return path, key


def test_a_key_is_made_for_a_tenant_that_may_be_one_and_named_as_one_likes(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="tenant"):
        new_key("a b")
    path = tmp_path / "keys.toml"
    path.write_text(new_key("alice", 'the "other" laptop')[1])
    assert [entry.name for entry in read_keys(path)] == ['the "other" laptop']


def test_a_key_leads_to_its_tenant_and_the_file_holds_its_digest_only(
    key_file: tuple[Path, str],
) -> None:
    path, key = key_file
    ring = Keyring(path)
    caller = ring.caller(key)
    assert caller == Caller("alice", "laptop", "batch", sees_status=True)
    assert [caller.may(p) for p in ("interactive", "default", "batch")] == [False, False, True]
    assert ring.caller(key[:-1]) is ring.caller(key + "x") is ring.caller(None) is None
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert ring.caller(digest) is None, "who reads the file has no key"
    assert key not in path.read_text()
    assert digest in path.read_text()


def test_without_a_file_any_key_is_a_strangers(key_file: tuple[Path, str]) -> None:
    path, key = key_file
    ring = Keyring(None, stranger="all")
    assert ring.caller(None) == ring.caller(key) == Caller("all", "anonymous", sees_status=True)
    both = Keyring(path, stranger="guests")
    assert both.caller(None) == Caller("guests", "anonymous")
    assert both.caller("wrong") is None, "a key that is given has to be right"


def test_a_changed_file_is_followed_and_a_broken_one_is_not(
    key_file: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    path, key = key_file
    clock = Clock()
    ring = Keyring(path, clock=clock)
    other, entry = new_key("bob")
    path.write_text(entry)
    assert ring.caller(other) is None, "not looked at again so soon"
    clock.now += CHECK_S
    assert ring.caller(other) == Caller("bob", "bob")
    assert ring.caller(key) is None
    path.write_text("broken")
    clock.now += CHECK_S
    assert ring.caller(other) == Caller("bob", "bob")
    assert "keys_file_refused" in caplog.messages
    path.unlink()
    clock.now += CHECK_S
    assert ring.caller(other) == Caller("bob", "bob")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[keys]]\nname = "a"\ntenant = "a b"\nsha256 = "00"', "keys.0.tenant"),
        ('[[keys]]\nname = "a"\ntenant = "a"\nsha256 = "tf-plain"', "keys.0.sha256"),
        ('[[keys]]\nname = "a"\ntenant = "a"\nsha256 = "{0}"\nadmin = 1', "keys.0.admin"),
        ('[[keys]]\nname = "a"\ntenant = "a"\nsha256 = "{0}"\n' * 2, "name is there twice: a"),
        ("keys = 3", "keys"),
        ("[", "not valid TOML"),
    ],
)
def test_a_faulty_key_file_is_refused_by_place_without_its_digests(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text.replace("{0}", "ab" * 32))
    with pytest.raises(SettingsError) as caught:
        read_keys(path)
    assert says in str(caught.value)
    assert "abab" not in str(caught.value)
    assert "tf-plain" not in str(caught.value)
